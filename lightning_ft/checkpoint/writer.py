"""The trainer's end of the writer process: starts it, gives it orders, starts another if it is gone."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_ft.checkpoint import writer_process
from lightning_ft.checkpoint.image import Image

_OF_ONE_PROCESS = "memory://"
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Written:
    """What the writer process did.

    Args:
        files: Of each file its ``path``, ``size``, ``xxh3``, and whether it went past the page cache (``direct``).
        seconds: How long it took.

    """

    files: list[dict[str, Any]]
    seconds: float


class Writer:
    """A process that writes images of files; started with the first order, and again if it died.

    Every method may be called from any thread; orders are carried out one after the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}  # that the process was started with
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process now rather than with the first order."""
        with self._lock:
            self._connect()

    def write(self, directory: str, image: Image, timeout: timedelta, known: Mapping[str, str] = _NONE) -> Written:
        """Write the files of ``image`` into a directory, or below a store's address; return once that will last.

        Args:
            directory: Where.
            image: What.
            timeout: A process that does not answer within it is ended.
            known: Checksums of files; those of others are taken.

        Raises:
            OSError: If that failed; ``ConnectionError`` if the process died, or this is closed.

        """
        if directory.startswith(_OF_ONE_PROCESS):  # nobody else can write there
            started = time.monotonic()
            with image.view() as memory, memoryview(memory) as view:
                files = writer_process.write_files(directory, image.files, view, known=known)
            return Written(files, time.monotonic() - started)
        order = {
            "directory": directory,
            "memory": image.name,
            "size": image.size,
            "files": image.files,
            "known": dict(known),
        }
        with self._lock:
            if "://" in directory and self._environment != dict(os.environ):
                self._end()  # credentials of a store may have been set since
            connection = self._connect()
            connection.settimeout(timeout.total_seconds())
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], [image.descriptor])
                answer = connection.recv(writer_process.MESSAGE_BYTES)
            except TimeoutError:
                answer, reason = b"", f"it did not answer within {timeout.total_seconds():g} s"
            except OSError as error:
                answer, reason = b"", str(error)
            else:
                reason = "it ended"
            if not answer:
                pid = self.pid
                self._end()
                raise ConnectionError(f"the writer process (pid {pid}) is gone: {reason}")
        result = json.loads(answer)
        if "error" in result:
            raise OSError(*result["error"])
        return Written(result["files"], result["seconds"])

    def forget(self, image: Image) -> None:
        """Have the process let go of the memory of an image that is not used any more."""
        with self._lock, contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.sendall(json.dumps({"forget": image.name}).encode())

    def close(self) -> None:
        """End the process; an order under way ends with an error. May be called twice."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes up whoever waits for an answer, with the lock
        with self._lock:
            self._end()

    def _connect(self) -> socket.socket:
        if self._closed:
            raise ConnectionError("the writer process was ended")
        if self._connection is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                script = str(Path(writer_process.__file__))
                command = [sys.executable, script, str(theirs.fileno()), str(os.getpid())]
                self._environment = dict(os.environ)
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._connection = ours
        return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:  # it is in a write that does not return
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
            self._process = None
