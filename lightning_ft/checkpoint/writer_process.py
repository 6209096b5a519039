"""The process that brings checkpoints to the disk: it writes, checks sums and syncs while the trainer computes.

It runs this file alone, without torch and without the package: it starts within 50 ms, takes 10 MB, and holds no socket of
the training. What it needs for stores it imports with the first order for one. Orders come over a socket, each with the
memory that holds the files; when the other end is gone it exits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

DIRECT_ALIGNMENT = 4096
MESSAGE_BYTES = 1 << 16
_CHUNK = 32 << 20  # each call costs CPU time, and none ends before all of it is on the disk
_CHUNK_FOR_STORE = 8 << 20
_LONGEST_TEXT = 500
_POLL = 1.0  # seconds; children of the trainer may hold the other end of the socket, so its end is not enough to go by


def write_file(
    path: str, data: memoryview, keep_on: Callable[[], None] = lambda: None, known: str | None = None
) -> dict[str, Any]:
    """Write and sync one file; past the page cache where the file system allows it, which costs no CPU.

    Args:
        path: Where.
        data: What; to go past the page cache it must begin at a page.
        keep_on: Called before every chunk; what it raises ends the write.
        known: Its checksum, if that was taken before.

    Returns:
        Its ``size``, its checksum ``xxh3`` and whether it went past the page cache (``direct``).

    """
    num_direct = len(data) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    descriptor, direct = _create(path, wants_direct=num_direct > 0)
    went_direct = direct
    checksum = xxhash.xxh3_64()
    try:
        done = 0
        while done < len(data):
            keep_on()
            if direct and done == num_direct:
                direct = False  # what is left is no whole block
                _leave_direct(descriptor)
            end = min(done + _CHUNK, num_direct if direct else len(data))
            try:
                written = os.write(descriptor, data[done:end])
            except OSError as error:
                if not (direct and error.errno == errno.EINVAL):
                    raise
                direct = went_direct = False  # the file system took the flag, but not the write
                _leave_direct(descriptor)
                continue
            if written == 0:
                raise OSError(errno.EIO, "the file system took no more data", path)
            if direct and written % DIRECT_ALIGNMENT:
                direct = False  # cut short: what follows begins at no page
                _leave_direct(descriptor)
            if known is None:
                checksum.update(data[done : done + written])
            done += written
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)
    return {"size": len(data), "xxh3": known or checksum.hexdigest(), "direct": went_direct}


def _create(path: str, *, wants_direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if wants_direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags, 0o644), False


def _leave_direct(descriptor: int) -> None:
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def sync_directory(path: str) -> None:
    """Make names that were created in or moved into a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_files(
    directory: str,
    files: list[tuple[str, int, int]],
    memory: memoryview,
    keep_on: Callable[[], None] = lambda: None,
    known: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Write files into a directory, which is made if it is not there, and sync it.

    Args:
        directory: Where; a store's address, too.
        files: Of each its name, where it begins in ``memory``, and its size.
        memory: Holds their content.
        keep_on: See :func:`write_file`.
        known: Checksums of files that were taken before.

    """
    known = known or {}
    if "://" in directory:
        return _write_to_store(directory, files, memory, keep_on, known)
    os.makedirs(directory, exist_ok=True)
    written = []
    for name, offset, size in files:
        result = write_file(os.path.join(directory, name), memory[offset : offset + size], keep_on, known.get(name))
        written.append({"path": name, **result})
    sync_directory(directory)
    return written


def _write_to_store(
    url: str, files: list[tuple[str, int, int]], memory: memoryview, keep_on: Callable[[], None], known: Mapping[str, str]
) -> list[dict[str, Any]]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    store, path = url_to_fs(url)
    written = []
    for name, offset, size in files:
        checksum = xxhash.xxh3_64()
        file = store.open(f"{path}/{name}", "wb")
        try:
            for begin in range(offset, offset + size, _CHUNK_FOR_STORE):
                keep_on()
                chunk = memory[begin : min(begin + _CHUNK_FOR_STORE, offset + size)]
                if name not in known:
                    checksum.update(chunk)
                file.write(chunk)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # the parts that are there
            raise
        file.close()
        written.append({"path": name, "size": size, "xxh3": known.get(name) or checksum.hexdigest(), "direct": False})
    return written


class _Orders:
    """Answers orders until nobody can give any."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._memories: dict[str, mmap.mmap] = {}
        self._watched = False

    def serve(self) -> None:
        while True:
            while not select.select([self._connection], [], [], _POLL)[0]:
                self._keep_on()
            message, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
            if not message:
                return
            order = json.loads(message)
            if "forget" in order:
                self._memories.pop(order["forget"], None)
                continue
            self._connection.sendall(json.dumps(self._answer(order, descriptors)).encode())

    def _answer(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        started = time.monotonic()
        try:
            memory = self._map(order["memory"], order["size"], descriptors)
            if "://" in order["directory"]:
                self._watch()
            with memoryview(memory) as view:
                files = write_files(order["directory"], order["files"], view, self._keep_on, order["known"])
        except OSError as error:
            text = (error.strerror or str(error))[:_LONGEST_TEXT]
            return {"error": [error.errno or errno.EIO, text, error.filename or order["directory"]]}
        except Exception as error:  # each store has its own
            return {"error": [errno.EIO, f"{type(error).__name__}: {error}"[:_LONGEST_TEXT], order["directory"]]}
        return {"files": files, "seconds": time.monotonic() - started}

    def _watch(self) -> None:
        """Have this process end with the other one also while a store keeps it waiting."""

        def watch() -> None:
            while True:
                self._keep_on()
                time.sleep(_POLL)

        if not self._watched:
            self._watched = True
            threading.Thread(target=watch, daemon=True).start()

    def _map(self, name: str, size: int, descriptors: list[int]) -> mmap.mmap:
        try:
            known = self._memories.get(name)
            if known is None or len(known) != size:
                self._memories[name] = known = mmap.mmap(descriptors[0], size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return known

    def _keep_on(self) -> None:
        """End this process if the one that gave the order is gone: nobody will take what it writes."""
        if os.getppid() != self._parent:
            os._exit(0)


def _stand_back() -> None:
    """Leave busy cores to the trainer. A sleeper that wakes would interrupt it, with each chunk that is on the disk."""
    os.nice(15)  # a thirtieth of a core is left, so that a save ends: that checks 200 MB a second
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Serve the socket and the process that the arguments name."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _stand_back()
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # names in here are not those that others import
    with contextlib.suppress(ConnectionError):  # the trainer is gone
        _Orders(socket.socket(fileno=descriptor), parent).serve()


if __name__ == "__main__":
    main()
