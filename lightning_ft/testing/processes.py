"""Processes that tests start: forked quickly, waited for with a bound, and ended with all that they started."""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_ft.supervision.processes import become_subreaper
from lightning_ft.supervision.zygote import Zygote

_server: "ForkServer | None" = None


class Process:
    """A running process that is a child of this one.

    Args:
        pid: Its number.

    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, ``-signum`` if a signal ended it; None if it still runs after ``timeout`` seconds."""
        if self._code is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([descriptor], [], [], max(0.0, timeout))
            finally:
                os.close(descriptor)
            if not ended:
                return None
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def abort_tree(self, timeout: float) -> None:
        """Have all descendants print where they are and end; return when this process ended too, or after ``timeout``.

        It itself is left alone, since it may be the one that forwards their output.
        """
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        self.wait(timeout)

    def kill_tree(self) -> None:
        """End it, if it still runs, and all its descendants. May be called twice."""
        if self._code is not None:
            return
        os.kill(self.pid, signal.SIGSTOP)  # so that it starts nothing while its descendants are collected
        tree = [self.pid, *descendants(self.pid)]
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(60.0)
        for pid in tree[1:]:
            with contextlib.suppress(ChildProcessError):  # its own parent outlived it, and took note
                os.waitpid(pid, 0)


class ForkServer:
    """Forks processes that have torch and lightning imported."""

    def __init__(self) -> None:
        become_subreaper()  # the parent of what the server forks: it can wait for it, and is outlived by none of it
        os.environ["PYTHONFAULTHANDLER"] = "1"  # so that a process that is aborted says where it was
        try:
            self._zygote = Zygote.exec()
        finally:
            del os.environ["PYTHONFAULTHANDLER"]

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], directory: Path, stdout: Path, stderr: Path
    ) -> Process:
        """Start a Python command.

        Args:
            command: ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["-c", "code", ...]``.
            environ: Its whole environment.
            directory: Its working directory.
            stdout: File that it writes to.
            stderr: File that it writes to.

        """
        with open(os.devnull, "rb") as stdin, open(stdout, "wb") as out, open(stderr, "wb") as err:
            stdio = stdin.fileno(), out.fileno(), err.fileno()
            return Process(self._zygote.spawn(command, environ, str(directory), *stdio))

    def close(self) -> None:
        """End the server."""
        self._zygote.close()


def fork_server() -> ForkServer:
    """Return the fork server of this process; the first call starts it, which takes seconds."""
    global _server
    if _server is None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def end_process(code: int = 0) -> NoReturn:
    """End this process as children of ``multiprocessing`` end: threads are joined, exit functions run, output is flushed.

    The interpreter would also free all that torch and lightning consist of: half a second of CPU time, in every rank. The
    last line of a script that many tests run may be this. Files that the script left open are not flushed.

    Args:
        code: The exit code.

    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def descendants(pid: int) -> list[int]:
    """Return the children of ``pid``, their children and so on."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def children(pid: int) -> list[int]:
    """Return the child processes of ``pid``; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
