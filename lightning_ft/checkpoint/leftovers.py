"""Collects what writers that died left behind, and nothing of those that live."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

from lightning_ft.checkpoint import store_leftovers
from lightning_ft.checkpoint.layout import STAGING_PREFIX, TRASH_PREFIX, trash_name
from lightning_ft.checkpoint.store_path import StorePath, place

log = logging.getLogger(__name__)


def claim(staging: str | os.PathLike[str]) -> int:
    """Say that this process writes into a staging directory, for as long as the returned descriptor is open.

    The kernel takes the word back when the process dies, whatever it dies of. Every rank claims it for its own files, and
    the one that commits until it has renamed the directory.
    """
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:  # a file system without locks: then nobody can tell, and nobody collects
        log.debug("%s can't be locked (%s)", staging, error)
    return descriptor


def collect(dirpath: str | os.PathLike[str]) -> list[str]:
    """Remove staging directories that no living process claims, and what was about to be removed already.

    Returns:
        Their names.

    """
    root = place(dirpath)
    if isinstance(root, StorePath):
        return store_leftovers.collect(root)
    if not root.is_dir():
        return []
    collected = []
    for name in sorted(os.listdir(root)):
        path = root / name
        if path.is_symlink() or not path.is_dir():
            continue
        if name.startswith(TRASH_PREFIX):
            shutil.rmtree(path, ignore_errors=True)
            collected.append(name)
        elif name.startswith(STAGING_PREFIX) and _take(path):
            collected.append(name)
    return collected


def discard(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint; it stops being one at once, and a kill in between leaves no half of it.

    Raises:
        OSError: If it can't be renamed.
        StoreUnreachableError: If the store that it is in does not answer.

    """
    path = place(path)
    if isinstance(path, StorePath):
        store_leftovers.discard(path)
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    trash = path.with_name(trash_name(path.name))
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _take(staging: Path) -> bool:
    """Remove a staging directory if nobody claims it."""
    try:
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # somebody else took it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        discard(staging)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
