"""Decides which checkpoint a Trainer call loads, together on all ranks, and has it verified before anything is loaded."""

import os
from collections.abc import Iterable
from contextlib import suppress

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.migration import migrate_checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ft.checkpoint.kept_copy import KeptCopy
from lightning_ft.checkpoint.leftovers import collect, discard
from lightning_ft.checkpoint.lightning_dict import read_checkpoint, restore_tensors
from lightning_ft.checkpoint.reader import DefaultGroup, candidates, check, newest_valid
from lightning_ft.checkpoint.store_path import Place, follow, is_store, local_form, place
from lightning_ft.checkpoint.verify import read_manifest
from lightning_ft.errors import DamagedCheckpointError, StoreUnreachableError
from lightning_ft.trainer.local_copy import readable

_LEFT_TO_LIGHTNING = ("http://", "https://", "ft://")
"""Single files of the web, and what a live rank hands out."""


class VerifiedResume:
    """Stands before the Trainer's own loading of checkpoints.

    What is asked for by its path is loaded or an error; where the newest one is asked for, the newest intact one is loaded.
    Directories are read here for strategies that know only single files.

    Args:
        trainer: Whose loading.

    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._resume_start = self._connector.resume_start
        self._directories: dict[str, bool] = {}
        self._newest: set[str] = set()
        self.chosen: str | None = None
        """What the last call loaded as the newest intact one, without having been given its path."""
        self.loading: str | None = None
        """The checkpoint that is being loaded, by its own path though a copy of it is read."""

    @classmethod
    def of(cls, trainer: Trainer) -> "VerifiedResume":
        """Return the one of this Trainer, which is put in its place with the first call."""
        present = getattr(trainer._checkpoint_connector.resume_start, "__self__", None)
        if isinstance(present, cls):
            return present
        resume = cls(trainer)
        trainer._checkpoint_connector.resume_start = resume.resume_start  # type: ignore[method-assign]
        return resume

    @property
    def resumed_from(self) -> tuple[str | None, str | None]:
        """What the Trainer resumed from, and :attr:`chosen`; a rank that joins takes it over from the others."""
        path = self._connector._ckpt_path
        return None if path is None else os.fspath(path), self.chosen

    @resumed_from.setter
    def resumed_from(self, value: tuple[str | None, str | None]) -> None:
        self._connector._ckpt_path, self.chosen = value

    def offer(self, dirpath: _PATH, *, auto: bool, newest: str | None) -> None:
        """Say where the checkpoints of this Trainer are; to be called before each Trainer call loads one.

        Args:
            dirpath: Where they are.
            auto: Whether a fit that is not told what to load resumes from the newest one in there.
            newest: The path that was given to the Trainer in place of ``"last"``, if it was.

        """
        self._directories[os.fspath(dirpath)] = auto
        if newest is not None:
            self._newest.add(newest)

    def resume_start(self, checkpoint_path: _PATH | None = None, weights_only: bool | None = None) -> None:
        """Collective. Load what was asked for, in place of Lightning's method of this name."""
        directories, self._directories = self._directories, {}
        newest, self._newest = self._newest, set()
        path = None if not checkpoint_path else local_form(checkpoint_path)
        self.chosen = None
        if path is not None and path.startswith(_LEFT_TO_LIGHTNING):
            self._resume_start(checkpoint_path, weights_only)
            return
        ranks = DefaultGroup()
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if fitting and ranks.rank == 0:
            for directory in directories:
                with suppress(StoreUnreachableError):  # whoever reads or saves there tells
                    collect(directory)
        copy = KeptCopy(ranks)
        try:
            self.loading = path = self._verified(path, directories, newest, ranks, copy)
            self._load(path, weights_only, copy)
            if copy.directory is not None:
                ranks.first_problem(None)  # all have read it
        finally:
            self.loading = None
            copy.close()

    def _verified(
        self, path: str | None, directories: dict[str, bool], newest: set[str], ranks: DefaultGroup, copy: KeptCopy
    ) -> str | None:
        """Collective. Return what is loaded, once it is known to be intact."""
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if path is None:
            path = self.chosen = (
                self._choose(directories, ranks, copy) if fitting and self._trainer.global_step == 0 else None
            )
        elif path in newest:
            path = self.chosen = _newest_of(path, directories, ranks, copy)
        elif ranks.broadcast(place(path).exists()):  # otherwise Lightning says what it says
            _check_asked(path, ranks, copy)
        if path is not None and fitting and ranks.rank == 0:
            _finish_removals(place(path), directories)
        return path

    def _choose(self, directories: dict[str, bool], ranks: DefaultGroup, copy: KeptCopy) -> str | None:
        searched = [directory for directory, auto in directories.items() if auto]
        path = newest_valid(searched, ranks, copy=copy) if searched else None
        if searched and path is None:
            places = " or ".join(searched)
            if ranks.broadcast(any(candidates(directory) for directory in searched)):
                rank_zero_warn(f"No checkpoint in {places} is intact: training starts from the beginning.")
            else:
                rank_zero_info(f"There is no checkpoint in {places}: training starts from the beginning.")
        return path

    def _load(self, path: str | None, weights_only: bool | None, copy: KeptCopy) -> None:
        strategy = self._trainer.strategy
        own = type(strategy).load_checkpoint is not Strategy.load_checkpoint
        if path is None:
            self._resume_start(path, weights_only)
            return
        source = path if copy.directory is None else os.fspath(copy.directory)
        if own or not place(path).is_dir():
            with readable(self._trainer, source) as where:
                self._resume_start(where, weights_only)
                if isinstance(strategy, ModelParallelStrategy) and place(where).is_dir():
                    self._connector._loaded_checkpoint = restore_tensors(self._connector._loaded_checkpoint, where)
            self._connector._ckpt_path = path
            return
        rank_zero_info(f"Restoring states from the checkpoint path at {path}")
        self._connector._ckpt_path = path
        self._connector._loaded_checkpoint, _ = migrate_checkpoint(read_checkpoint(source, weights_only))


def _check_asked(path: str, ranks: DefaultGroup, copy: KeptCopy) -> None:
    """Collective. Have nothing loaded from a checkpoint that is damaged, and say which one could be."""
    try:
        check(path, ranks, copy=copy)
    except DamagedCheckpointError as error:
        beside = newest_valid([place(path).parent], ranks)
        raise DamagedCheckpointError(path, error.reason, beside) from None


def _newest_of(path: str, directories: Iterable[str], ranks: DefaultGroup, copy: KeptCopy) -> str:
    """Collective. Return the newest intact checkpoint; ``path`` is the newest one, intact or not."""
    searched = directories if is_store(path) else {os.path.dirname(path), *directories}
    found = newest_valid(searched, ranks, copy=copy)
    if found is None:
        raise DamagedCheckpointError(path, "none beside it is intact either, as the warnings above say")
    return found


def _finish_removals(path: Place, directories: Iterable[str]) -> None:
    """Remove what an intact checkpoint replaced, if a kill came in between; nothing outside of this run's directories."""
    own = {place(directory) for directory in directories}
    if path.parent not in own:
        return
    with suppress(DamagedCheckpointError, StoreUnreachableError, OSError):  # one that Lightning wrote replaces nothing
        for way in read_manifest(path).replaces:
            old = follow(path.parent, way)
            if old != path and old.parent in own:
                with suppress(FileNotFoundError):
                    discard(old)
