"""Where the ranks write a checkpoint, and the one step by which all that they wrote becomes one.

In a file system they write beside it, and the directory gets its name when it is whole. Stores can't rename. There they
write below its name, into a directory of this save alone, and it is whole once its manifest is there, which names that
directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from lightning_ft.checkpoint import store_leftovers
from lightning_ft.checkpoint.layout import MANIFEST, FileEntry, Manifest, data_name, staging_name
from lightning_ft.checkpoint.leftovers import claim, discard
from lightning_ft.checkpoint.store_path import Place, StorePath
from lightning_ft.checkpoint.writer_process import sync_directory, write_file
from lightning_ft.errors import MalformedStateError, StoreUnreachableError

_T = TypeVar("_T")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_unanswered: dict[str, threading.Thread] = {}
"""The last request about a checkpoint that was given up."""


class PublishInDoubtError(StoreUnreachableError):
    """It is not known whether the manifest arrived: nothing that it names may be removed."""


class Staging(Protocol):
    """Where one save is written."""

    @property
    def target(self) -> Place:
        """The checkpoint that it becomes."""

    @property
    def directory(self) -> Place:
        """Where its files are written."""

    @property
    def content(self) -> Place:
        """Where they are once it is a checkpoint."""

    def enter(self) -> Callable[[], None]:
        """Say that this process writes here, until what is returned is called; nobody collects it meanwhile."""

    def write(self, name: str, data: bytes) -> FileEntry:
        """Write a file that is small."""

    def share(self, content: Place, name: str) -> None:
        """Take over a file of another checkpoint."""

    def sync(self) -> None:
        """Make what was taken over last."""

    def sizes(self) -> dict[str, int]:
        """Return the names of the files that are there, and how long they are."""

    def publish(self, manifest: Manifest) -> None:
        """Make it the checkpoint, in place of what has its name.

        Raises:
            OSError: If that fails; then nothing changed.
            StoreUnreachableError: Alike.
            PublishInDoubtError: If it may have failed.

        """

    def published(self) -> Manifest | None:
        """Return the manifest of the checkpoint that is there, if it may be this one."""

    def discard(self) -> None:
        """Remove what was written."""


def staging_of(target: Place, token: str, timeout: timedelta) -> Staging:
    """Return where checkpoint ``target`` is written.

    Args:
        target: What it becomes.
        token: The same on all ranks and another one in each attempt, which keeps out writers of a dead process.
        timeout: How long a store may take for each request.

    """
    if isinstance(target, StorePath):
        return StoreStaging(target, token, timeout)
    return LocalStaging(target, token)


class LocalStaging:
    """In a file system."""

    def __init__(self, target: Path, token: str) -> None:
        self.target = self.content = target
        self.directory = target.with_name(staging_name(target.name, token))

    def enter(self) -> Callable[[], None]:
        os.makedirs(self.directory, exist_ok=True)
        descriptor = claim(self.directory)
        return lambda: os.close(descriptor)

    def write(self, name: str, data: bytes) -> FileEntry:
        written = write_file(str(self.directory / name), memoryview(data))
        return FileEntry(name, written["size"], written["xxh3"])

    def share(self, content: Place, name: str) -> None:
        os.link(content / name, self.directory / name)

    def sync(self) -> None:
        sync_directory(str(self.directory))

    def sizes(self) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(self.directory)}

    def publish(self, manifest: Manifest) -> None:
        self.write(MANIFEST, manifest.to_bytes())
        self.sync()
        move_into_place(self.directory, self.target)

    def published(self) -> Manifest | None:
        return _manifest_in(self.target / MANIFEST)

    def discard(self) -> None:
        with suppress(OSError):  # another rank did, or the next start will
            discard(self.directory)


class StoreStaging:
    """In a store. Requests that take too long are left behind: they may still have an effect.

    Args:
        target: What it becomes.
        token: Of this save.
        timeout: For each request.

    """

    def __init__(self, target: StorePath, token: str, timeout: timedelta) -> None:
        self.target = target
        self.directory = self.content = target / data_name(token)
        self._timeout = timeout.total_seconds()

    def enter(self) -> Callable[[], None]:
        release = self._within(lambda: store_leftovers.claim(self.directory))

        def leave() -> None:
            with suppress(OSError, StoreUnreachableError):  # collected with this process's end
                self._within(release)

        return leave

    def write(self, name: str, data: bytes) -> FileEntry:
        self._within(lambda: (self.directory / name).write_bytes(data))
        return FileEntry(name, len(data), xxhash.xxh3_64_hexdigest(data))

    def share(self, content: Place, name: str) -> None:
        source = content / name
        assert isinstance(source, StorePath), "twins are saved in one store"
        self._within(lambda: (self.directory / name).copy_from(source))

    def sync(self) -> None:
        """What a store took is there."""

    def sizes(self) -> dict[str, int]:
        return {entry.path.name: entry.status.st_size for entry in self._within(self.directory.entries)}

    def publish(self, manifest: Manifest) -> None:
        data = replace(manifest, data=self.directory.name).to_bytes()
        self._wait_for_earlier()
        try:
            self._within(lambda: (self.target / MANIFEST).write_bytes(data))
        except (OSError, StoreUnreachableError) as error:
            reason = error.reason if isinstance(error, StoreUnreachableError) else str(error)
            raise PublishInDoubtError(str(self.target / MANIFEST), reason) from error
        with suppress(OSError, StoreUnreachableError):  # the next start collects it
            self._within(lambda: store_leftovers.collect_below(self.target))

    def published(self) -> Manifest | None:
        with suppress(StoreUnreachableError):
            manifest = self._within(lambda: _manifest_in(self.target / MANIFEST))
            return manifest if manifest is not None and manifest.data == self.directory.name else None
        return None

    def discard(self) -> None:
        with suppress(OSError, StoreUnreachableError):
            self._within(self.directory.remove)

    def _within(self, request: Callable[[], _T]) -> _T:
        results: list[_T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                results.append(request())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="lightning_ft-store", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if errors:
            raise errors[0]
        if not results:
            _unanswered[str(self.target)] = thread
            raise StoreUnreachableError(str(self.target), f"no answer within {self._timeout:g} s")
        return results[0]

    def _wait_for_earlier(self) -> None:
        """Have no manifest that was given up arrive after this one, and take its place."""
        earlier = _unanswered.get(str(self.target))
        if earlier is not None:
            earlier.join(self._timeout)
            if earlier.is_alive():
                raise StoreUnreachableError(str(self.target), "an earlier request is not answered yet")
            del _unanswered[str(self.target)]


def _manifest_in(path: Place) -> Manifest | None:
    try:
        return Manifest.from_bytes(path.read_bytes())
    except (OSError, MalformedStateError):
        return None


def move_into_place(staging: Path, target: Path) -> None:
    """Give a directory its name; what has that name until then is there until the new one is.

    Raises:
        OSError: If that fails; then nothing changed.

    """
    replaces = os.path.lexists(target)
    if not replaces:
        os.rename(staging, target)
    elif not _exchange(staging, target):
        discard(target)  # the file system can't exchange two names: for a moment there is none
        os.rename(staging, target)
        replaces = False
    sync_directory(str(target.parent))
    if replaces:
        with suppress(OSError):  # the next start collects it
            discard(staging)


def _exchange(first: Path, second: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))
