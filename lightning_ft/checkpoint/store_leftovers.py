"""Collects what writers that died left in a store, and nothing of those that live.

Stores have no locks: a process that writes leaves a claim, which says who it is. On the same machine that tells whether it
lives. Those of other machines count until nothing was written beside them for a day.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from lightning_ft.checkpoint.layout import CLAIM_PREFIX, DATA_PREFIX, MANIFEST, Manifest
from lightning_ft.checkpoint.store_path import StorePath
from lightning_ft.errors import MalformedStateError

log = logging.getLogger(__name__)

_LONGEST_SILENCE = 24 * 3600.0


def claim(directory: StorePath) -> Callable[[], None]:
    """Say that this process writes into a directory; return what takes that back."""
    path = directory / f"{CLAIM_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    owner = {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}
    path.write_bytes(json.dumps(owner).encode())
    return partial(path.unlink, missing_ok=True)


def collect(dirpath: StorePath) -> list[str]:
    """Remove what no living process writes, and no checkpoint holds, from all checkpoints in ``dirpath``.

    Returns:
        The addresses of what was removed.

    """
    try:
        found = dirpath.entries()
    except FileNotFoundError:
        return []
    return [name for entry in found if entry.is_directory for name in collect_below(entry.path)]


def collect_below(target: StorePath) -> list[str]:
    """Do it for one checkpoint, or for what was to become one."""
    try:
        entries = target.entries()
        data = [entry.path for entry in entries if entry.is_directory and entry.path.name.startswith(DATA_PREFIX)]
        is_there = any(entry.path.name == MANIFEST for entry in entries)
        if len(data) <= is_there:
            return []
        held = Manifest.from_bytes((target / MANIFEST).read_bytes()).data if is_there else ""
    except (FileNotFoundError, MalformedStateError):  # somebody removes it; or it is not known what it holds
        return []
    removed = [path for path in data if path.name != held and not _is_claimed(path)]
    for path in removed:
        path.remove()
    return [str(path) for path in removed]


def discard(path: StorePath) -> None:
    """Remove a checkpoint; it stops being one at once, and a kill in between leaves no half of it."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.remove()


def _is_claimed(directory: StorePath) -> bool:
    try:
        entries = directory.entries()
    except FileNotFoundError:
        return False
    newest = max((entry.status.st_mtime for entry in entries), default=0.0)
    claims = [entry.path for entry in entries if entry.path.name.startswith(CLAIM_PREFIX)]
    return any(_holds(path, newest) for path in claims)


def _holds(path: StorePath, newest: float) -> bool:
    try:
        owner = json.loads(path.read_bytes())
        machine, pid, started = owner["machine"], int(owner["pid"]), owner["started"]
    except FileNotFoundError:
        return False
    except (ValueError, TypeError, KeyError):
        machine, pid, started = "", 0, ""
    if machine == _machine():
        return bool(_started(pid) == started)
    return time.time() - newest < _LONGEST_SILENCE


@lru_cache
def _machine() -> str:
    """Return what is the same for processes that can see each other."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """Return when a process was started; its number may be another's by now. None if there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
