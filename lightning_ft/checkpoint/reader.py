"""Finds the newest checkpoint that is intact, the same one on all ranks."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_ft.checkpoint.kept_copy import KeptCopy
from lightning_ft.checkpoint.layout import HIDDEN_PREFIXES, MANIFEST, META, METADATA
from lightning_ft.checkpoint.store_path import Place, StorePath, is_store, place
from lightning_ft.checkpoint.verify import Share, Thoroughness, read_manifest, verify
from lightning_ft.errors import DamagedCheckpointError, StoreUnreachableError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReadingRanks(Protocol):
    """The ranks that look for a checkpoint together."""

    @property
    def rank(self) -> int:
        """Position of this process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def broadcast(self, value: _T) -> _T:
        """Collective. Return the value of rank 0."""

    def first_problem(self, problem: str | None) -> str | None:
        """Collective. Return the problem of a rank that has one."""


class Alone:
    """A single process."""

    rank = 0
    size = 1

    def broadcast(self, value: _T) -> _T:
        return value

    def first_problem(self, problem: str | None) -> str | None:
        return problem


class DefaultGroup:
    """The ranks of torch's default process group; a single process if there is none."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def broadcast(self, value: _T) -> _T:
        return self._gather(value)[0]

    def first_problem(self, problem: str | None) -> str | None:
        return next((text for text in self._gather(problem) if text is not None), None)

    def _gather(self, value: _T) -> list[_T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class Candidate:
    """Something that may be a checkpoint.

    Args:
        path: Where it is.
        created: When it was saved, in seconds since 1970.
        step: Optimizer steps completed; -1 if that is not known without loading it.

    """

    path: str
    created: float
    step: int = -1


def candidates(dirpath: str | os.PathLike[str], suffix: str = ".ckpt") -> list[Candidate]:
    """Return all checkpoints in a directory, damaged ones among them, the newest first.

    Args:
        dirpath: Where to look.
        suffix: What names of single files end in.

    Raises:
        StoreUnreachableError: If the store that it is in does not answer: that is no reason to begin anew.

    """
    root = place(dirpath)
    found: dict[str, Candidate] = {}
    for candidate in _in_store(root, suffix) if isinstance(root, StorePath) else _in_directory(root, suffix):
        if candidate is not None:  # `last` may be a link to another one
            found.setdefault(_real(candidate.path), candidate)
    return sorted(found.values(), key=lambda candidate: (candidate.created, candidate.step, candidate.path), reverse=True)


def places(dirpath: str | os.PathLike[str], depth: int) -> list[str]:
    """Return a directory and those in it that may hold checkpoints, down to ``depth``."""
    found = [os.fspath(dirpath)]
    if depth > 0:
        checkpoints = {candidate.path for candidate in candidates(dirpath)}
        for path in _directories(place(dirpath)):
            if not path.name.startswith(HIDDEN_PREFIXES) and os.fspath(path) not in checkpoints:
                found += places(path, depth - 1)
    return found


def paths_in(dirpaths: Iterable[str]) -> set[str]:
    """Return what lies directly in directories of a store; nothing, after a warning, if it does not answer."""
    found: set[str] = set()
    try:
        for dirpath in dirpaths:
            with suppress(FileNotFoundError):
                found.update(str(entry.path) for entry in StorePath(dirpath).entries())
    except StoreUnreachableError as error:
        log.warning("%s Checkpoints that are there may be replaced by others of their names.", error)
    return found


def _directories(path: Place) -> list[Place]:
    """Return the directories in a directory, by name; links are none."""
    if isinstance(path, StorePath):
        with suppress(FileNotFoundError):
            return [entry.path for entry in path.entries() if entry.is_directory]
        return []
    if not path.is_dir():
        return []
    return [path / name for name in sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))]


def _real(path: str) -> str:
    return path if is_store(path) else os.path.realpath(path)


def _in_directory(root: Path, suffix: str) -> Iterator[Candidate | None]:
    with suppress(OSError):
        for name in os.listdir(root):
            if not name.startswith(HIDDEN_PREFIXES):
                yield _candidate(root / name, suffix)


def _in_store(root: StorePath, suffix: str) -> Iterator[Candidate | None]:
    with suppress(FileNotFoundError):
        for entry in root.entries():
            if entry.is_directory:
                yield None if entry.path.name.startswith(HIDDEN_PREFIXES) else _stored(entry.path)
            elif entry.path.name.endswith(suffix):
                yield Candidate(str(entry.path), entry.status.st_mtime)


def _stored(path: StorePath) -> Candidate | None:
    """Return the checkpoint whose files begin with this path, if they have what makes them one."""
    try:
        entries = {entry.path.name: entry for entry in path.entries()}
        if not entries.keys() & {MANIFEST, METADATA, META}:
            return None
        manifest = read_manifest(path)
    except DamagedCheckpointError:
        return Candidate(str(path), max(entry.status.st_mtime for entry in entries.values()))
    except FileNotFoundError:  # it was removed meanwhile
        return None
    return Candidate(str(path), manifest.created, manifest.step)


def _candidate(path: Path, suffix: str) -> Candidate | None:
    try:
        changed = path.stat().st_mtime
        if not path.is_dir():
            return Candidate(os.fspath(path), changed) if path.name.endswith(suffix) else None
        if not any((path / name).exists() for name in (MANIFEST, METADATA, META)) and not path.name.endswith(suffix):
            return None
        manifest = read_manifest(path)
    except DamagedCheckpointError:
        return Candidate(os.fspath(path), changed)
    except OSError:  # it was removed meanwhile, or is a link to itself
        return None
    return Candidate(os.fspath(path), manifest.created, manifest.step)


def check(
    path: str,
    peers: ReadingRanks | None = None,
    thoroughness: Thoroughness = "full",
    copy: KeptCopy | None = None,
) -> None:
    """Collective. Check one checkpoint; each rank reads its share.

    Args:
        path: The checkpoint.
        peers: The ranks.
        thoroughness: How much to read.
        copy: Becomes one of it, if it is in a store.

    Raises:
        DamagedCheckpointError: On all ranks.
        StoreUnreachableError: On all ranks.

    """
    peers = Alone() if peers is None else peers
    problem = unreachable = manifest = None
    copy = copy if is_store(path) else None
    if copy is not None:
        copy.begin()
    while True:
        total = peers.size
        try:
            manifest = verify(path, thoroughness, Share(peers.rank, total), copy)
        except DamagedCheckpointError as error:
            problem = error.reason
        except StoreUnreachableError as error:
            unreachable = error.reason
        unreachable = peers.first_problem(unreachable)
        if unreachable is not None:
            raise StoreUnreachableError(path, unreachable)
        problem = peers.first_problem(problem)
        if problem is not None:
            raise DamagedCheckpointError(path, problem)
        if peers.size == total:  # otherwise a rank died, and what it was to read nobody has
            break
    if copy is not None:
        copy.finish(manifest)


def newest_valid(
    dirpaths: Iterable[str | os.PathLike[str]],
    peers: ReadingRanks | None = None,
    thoroughness: Thoroughness = "full",
    copy: KeptCopy | None = None,
) -> str | None:
    """Collective. Return the newest intact checkpoint, after a warning for each newer one; None if there is none.

    Args:
        dirpaths: Where to look.
        peers: The ranks.
        thoroughness: How much to read.
        copy: See :func:`check`.

    """
    peers = Alone() if peers is None else peers
    for path in peers.broadcast(_list(dirpaths) if peers.rank == 0 else ()):
        try:
            check(path, peers, thoroughness, copy)
        except DamagedCheckpointError as error:
            if peers.rank == 0:
                log.warning("Passed over checkpoint %s: %s. Looking for the one before it.", path, error.reason)
        else:
            return path
    return None


def _list(dirpaths: Iterable[str | os.PathLike[str]]) -> Sequence[str]:
    found = [candidate for dirpath in dirpaths for candidate in candidates(dirpath)]
    return [candidate.path for candidate in sorted(found, key=lambda candidate: -candidate.created)]
