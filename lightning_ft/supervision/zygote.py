"""A process that has imported what ranks need and forks them: a start takes milliseconds instead of seconds.

It has one thread and no sockets but its own: a fork of anything else may hang in a lock that another thread held.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lightning_ft.supervision import program
from lightning_ft.supervision.command import split
from lightning_ft.supervision.preload import preload
from lightning_ft.supervision.processes import end_with_parent, is_subreaper, num_threads

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")
_TIMEOUT = 60.0  # far above the time of a fork; only a zygote that is stopped or broken takes longer
_IMPORT_TIMEOUT = 600.0  # from a slow disk, on a loaded machine


class Zygote:
    """A fork server for Python commands.

    A started process is a child of the process that holds this object if that is a subreaper (see
    :func:`~lightning_ft.supervision.processes.become_subreaper`), and then ends with it; else it is init's.

    Args:
        sock: The connection to the server.
        pid: The server's process.
        timeout: Seconds to wait for its answers.

    """

    def __init__(self, sock: socket.socket, pid: int, timeout: float = _TIMEOUT) -> None:
        sock.settimeout(timeout)
        self._socket = sock
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = pid

    @classmethod
    def fork_here(cls) -> Zygote:
        """Fork the server off this process, with what this process has imported.

        Raises:
            RuntimeError: If this process has more than one thread.

        """
        if num_threads() > 1:
            raise RuntimeError(
                f"`Zygote.fork_here()` was called in a process with {num_threads()} threads: expected one. "
                "Use `Zygote.exec()`."
            )
        parent = os.getpid()
        here, there = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid == 0:
            here.close()
            try:
                end_with_parent(parent)
                _serve(there)
            except BaseException:  # whatever it is: this process must not run on into its parent's code
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        there.close()
        return cls(here, pid)

    @classmethod
    def exec(cls) -> Zygote:
        """Start the server as a new interpreter that imports what ranks need; returns before it has."""
        here, there = socket.socketpair()
        flags, _ = split(sys.orig_argv)
        code = f"from lightning_ft.supervision.zygote import main; main({there.fileno()})"
        with there:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        zygote = cls(here, process.pid, _IMPORT_TIMEOUT)
        zygote._process = process
        return zygote

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`reply` will not wait, for selectors."""
        return self._socket.fileno()

    def spawn(self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int) -> int:
        """Start ``command`` and return its process id.

        Args:
            command: ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["-c", "code", ...]``.
            env: Its whole environment.
            cwd: Its working directory.
            stdin: Descriptor that becomes its stdin; stays open here.
            stdout: Descriptor that becomes its stdout; stays open here.
            stderr: Descriptor that becomes its stderr; stays open here.

        Raises:
            ConnectionError: If the server is gone, or could not fork.

        """
        self.request(command, env, cwd, (stdin, stdout, stderr))
        return self.reply()

    def request(self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdio: tuple[int, int, int]) -> None:
        """Ask for what :meth:`spawn` does, without waiting for it; each request has one :meth:`reply`, in order.

        Raises:
            ConnectionError: If the server is gone.

        """
        parent = os.getpid() if is_subreaper() else 0
        request = json.dumps({"command": list(command), "env": dict(env), "cwd": cwd, "parent": parent}).encode()
        try:
            socket.send_fds(self._socket, [_LENGTH.pack(len(request))], stdio)
            self._socket.sendall(request)
        except OSError as error:
            raise ConnectionError(f"The process that forks ranks (pid {self.pid}) is gone.") from error

    def reply(self) -> int:
        """Return the process id of the next request's process.

        Raises:
            ConnectionError: If the server is gone, or could not fork.

        """
        try:
            (pid,) = _LENGTH.unpack(_receive(self._socket, _LENGTH.size))
        except OSError as error:
            raise ConnectionError(f"The process that forks ranks (pid {self.pid}) is gone.") from error
        if pid == 0:
            raise ConnectionError(f"The process that forks ranks (pid {self.pid}) could not fork.")
        return int(pid)

    def close(self) -> None:
        """End the server; what it started goes on."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()
        else:
            with contextlib.suppress(ChildProcessError):  # reaped by a loop that waits for everything
                os.waitpid(self.pid, 0)


def main(descriptor: int) -> NoReturn:
    """Serve in a process that :meth:`Zygote.exec` started."""
    preload()
    _serve(socket.socket(fileno=descriptor))


def _serve(sock: socket.socket) -> NoReturn:
    program.restore_signals()
    os.setsid()  # a Ctrl-C in the terminal is for the supervisor alone
    # What cluster managers send to every process of a job; a rank starts with nothing blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
    flags, _ = split(sys.orig_argv)
    while True:
        try:
            header, stdio, _, _ = socket.recv_fds(sock, _LENGTH.size, 3)
            header += _receive(sock, _LENGTH.size - len(header))
            request: dict[str, Any] = json.loads(_receive(sock, *_LENGTH.unpack(header)))
        except ConnectionError:
            os._exit(0)  # nobody is left who could ask for anything
        pid = _fork_orphan()
        if pid == 0:
            sock.close()
            if request["parent"]:
                end_with_parent(request["parent"])
            _become(request, stdio, flags)
        for descriptor in stdio:
            os.close(descriptor)
        try:
            sock.sendall(_LENGTH.pack(max(pid, 0)))
        except ConnectionError:
            os._exit(0)  # who asked is gone, and with it goes what was started


def _become(request: dict[str, Any], stdio: Sequence[int], flags: Sequence[str]) -> NoReturn:
    os.setsid()  # so that what it leaves behind can be ended as one group
    program.restore_signals()
    program.take_place(request["env"], request["cwd"], stdio)
    for descriptor in stdio:
        os.close(descriptor)
    program.run(request["command"], flags)


def _fork_orphan() -> int:
    """Fork a process whose parent is gone; return its pid, 0 in it, -1 if that failed.

    In it this returns once the subreaper has become its parent: the parent-death signal must not be asked for before,
    or the end of the process in the middle would set it off.
    """
    pid_reader, pid_writer = os.pipe()
    gate_reader, gate_writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(pid_writer, str(pid).encode())
            os._exit(0)
        for descriptor in (pid_reader, pid_writer, gate_writer):
            os.close(descriptor)
        os.read(gate_reader, 1)  # returns when the only writer left, the zygote, closes its end
        os.close(gate_reader)
        return 0
    os.waitpid(middle, 0)
    os.close(pid_writer)
    answer = os.read(pid_reader, 32)
    for descriptor in (pid_reader, gate_reader, gate_writer):
        os.close(descriptor)
    return int(answer) if answer else -1


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError("the other end is gone")
        data += chunk
    return bytes(data)
