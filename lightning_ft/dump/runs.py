"""Which runs write into a directory; what earlier ones left there is removed once, and nothing of a run that lives."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_ft.checkpoint.layout import TRASH_PREFIX
from lightning_ft.dump.layout import attempt_number, read_attempt

log = logging.getLogger(__name__)

_RUN_PREFIX = ".run-"
_CLEANED_PREFIX = ".cleaned-"


class Run:
    """Says that a process of a run is there, for as long as it lives, whatever it dies of.

    Args:
        directory: ``<directory>/<role>``.
        run_id: Of the run.

    """

    def __init__(self, directory: str | os.PathLike[str], run_id: str) -> None:
        self.directory = Path(directory)
        self.run_id = run_id
        self.directory.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(self.directory / f"{_RUN_PREFIX}{run_id}", _FLAGS, 0o666)
        _lock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Say so no more. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove_earlier(self, phase: str) -> bool:
        """Remove what runs that ended dumped in a phase, unless a process of this run did it already.

        Attempts get another name at once, and their files go in the background. What can't be removed stays, and is told.

        Returns:
            Whether this call was the one.

        """
        root = self.directory / phase
        marker = root / f"{_CLEANED_PREFIX}{self.run_id}"
        try:
            root.mkdir(exist_ok=True)
            os.close(os.open(marker, _FLAGS | os.O_EXCL, 0o666))
        except OSError as error:
            if marker.exists():
                return False
            log.warning("Dumps of earlier runs in %s are not removed: %s.", root, error)
            return False
        trash = [*root.glob(f"{TRASH_PREFIX}*")]
        for path in sorted(root.glob("rollout_*/attempt_*")):
            try:
                trash += self._put_away(path, root)
            except OSError as error:
                log.warning("The dump %s of an earlier run is not removed: %s.", path, error)
        threading.Thread(target=_remove, args=(trash,), name="removal of dumps", daemon=True).start()
        return True

    def _put_away(self, path: Path, root: Path) -> Iterable[Path]:
        attempt = read_attempt(path) if attempt_number(path) is not None else None
        if attempt is None or attempt.run_id == self.run_id or self._lives(attempt.run_id):
            return
        away = root / f"{TRASH_PREFIX}{self.run_id}-{path.parent.name}-{path.name}"
        os.rename(path, away)
        with suppress(OSError):  # others are in it
            path.parent.rmdir()
        yield away

    def _lives(self, run_id: str) -> bool:
        try:
            descriptor = os.open(self.directory / f"{_RUN_PREFIX}{run_id}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:  # somebody has it; or a file system without locks, where all runs count as living
        log.debug("%s", error)
        return False
    return True


def _remove(trash: Iterable[Path]) -> None:
    for path in trash:
        shutil.rmtree(path, onerror=_tell)


def _tell(function: object, path: str, info: object) -> None:
    log.warning("%s of an earlier run's dump is not removed: %s.", path, info[1] if isinstance(info, tuple) else info)
