"""A ModelCheckpoint for which ``"last"`` is the newest intact checkpoint, and from which a fit may resume by itself."""

import os
from typing import Any, Literal

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_ft.checkpoint.reader import candidates, places
from lightning_ft.checkpoint.store_path import StorePath, is_store, local_form, place, relative_to
from lightning_ft.trainer.verified_resume import VerifiedResume


class ResumableCheckpoint(ModelCheckpoint):
    """Finds checkpoints again, directories and single files, and has them verified before they are loaded.

    Args:
        resume: ``"auto"``: a fit without ``ckpt_path`` resumes from the newest intact checkpoint in ``dirpath``, if there is
            one. Give ``dirpath`` then: by default each run has a directory of its own.
        kwargs: Those of ``ModelCheckpoint``.

    Raises:
        ValueError: If ``resume`` is anything else.

    """

    def __init__(
        self, dirpath: _PATH | None = None, *args: Any, resume: Literal["auto"] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(None if dirpath is None else local_form(dirpath), *args, **kwargs)
        if resume not in (None, "auto"):
            raise ValueError(f'`{type(self).__name__}(resume={resume!r})` is not valid: expected "auto" or None.')
        self.resume = resume
        self._asked_for_newest: str | None = None

    def finish_saves(self) -> None:
        """Return once every save that was begun is there, or has failed."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.finish_saves()
        newest, self._asked_for_newest = self._asked_for_newest, None
        assert self.dirpath is not None
        for directory in self._places(self.dirpath):
            VerifiedResume.of(trainer).offer(directory, auto=self.resume == "auto", newest=newest)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """The newest one, which stands for itself and those before it until the ranks can look at them together."""
        self.finish_saves()
        dirpath = os.fspath(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        found = [candidate for path in self._places(dirpath) for candidate in candidates(path, self.FILE_EXTENSION)]
        found.sort(key=lambda candidate: -candidate.created)
        self._asked_for_newest = _datable(found[0].path) if found else None
        return set() if self._asked_for_newest is None else {self._asked_for_newest}

    def _places(self, dirpath: str | os.PathLike[str]) -> list[str]:
        """Return where checkpoints lie: a ``/`` in ``filename``, of a metric's name perhaps, makes directories."""
        return places(dirpath, (self.filename or "").count("/"))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Also what the training resumed from, unless its path was given: or each preemption would leave a checkpoint."""
        if previous == VerifiedResume.of(trainer).chosen and previous != current:
            assert self.dirpath is not None
            return _is_below(previous, self.dirpath)
        if is_store(previous):  # for which ModelCheckpoint does not look where it is, and who resumed from it
            given = None if trainer.ckpt_path is None else str(place(trainer.ckpt_path))
            return previous not in (current, given) and self.dirpath is not None and _is_below(previous, self.dirpath)
        return super()._should_remove_checkpoint(trainer, previous, current)


def _is_below(path: str, dirpath: _PATH) -> bool:
    way = relative_to(place(path), place(dirpath))
    return way is not None and not way.startswith("..")


def _datable(path: str) -> str | None:
    """Return something of a checkpoint in a store that has a date, by which Lightning compares: directories have none."""
    where = place(path)
    if not isinstance(where, StorePath) or not where.is_dir():
        return path
    return next((str(entry.path) for entry in where.entries() if not entry.is_directory), None)
