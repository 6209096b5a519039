"""Directories for copies that ranks of a machine read together; what a killed one leaves, the next one removes."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_ft.checkpoint.leftovers import claim

_PREFIX = "lightning_ft-copy-"
_TIME_TO_BE_HELD = 60.0  # seconds in which who made one comes to hold it


def make_directory() -> str:
    """Return a new directory; those are removed that no living process holds."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if time.time() - path.lstat().st_mtime > _TIME_TO_BE_HELD:
                _remove_unless_held(path)
    return tempfile.mkdtemp(prefix=_PREFIX)


def hold(directory: str | os.PathLike[str]) -> Callable[[], None]:
    """Have a directory stay until this process ends, or calls what is returned. It need not be on this machine."""
    try:
        descriptor = claim(directory)
    except OSError:
        return lambda: None
    return lambda: os.close(descriptor)


def _remove_unless_held(path: Path) -> None:
    with suppress(OSError):  # that of another user, or removed by another process
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
