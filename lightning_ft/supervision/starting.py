"""Start ranks: forked from the zygote where that is safe, else from nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_ft.elastic.options import StartMethod
from lightning_ft.supervision.command import split
from lightning_ft.supervision.preload import preload
from lightning_ft.supervision.processes import end_with_parent, num_threads
from lightning_ft.supervision.zygote import Zygote

log = logging.getLogger(__name__)

Key = tuple[int, int]  # slot, incarnation
Stdio = tuple[int, int, int]


@dataclass(frozen=True)
class _Request:
    """A start that the zygote was asked for; the descriptors are our own, for a start from nothing if it dies."""

    key: Key
    env: Mapping[str, str]
    stdio: Stdio


class Starter:
    """Starts processes that run ``program``.

    Must be made while this process has one thread, and before anything is set up that ranks should not inherit: the
    zygote is forked here; ``obstacle`` says why not, if that was not safe. A start does not wait for the fork: it is
    when ranks die that the supervisor has no time. Started processes lead their own session and end with this process.

    Args:
        program: ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["-c", "code", ...]``.
        method: See :class:`~lightning_ft.elastic.options.SupervisionOptions`.

    Raises:
        RuntimeError: If ``method`` is "fork" and forking is not safe.

    """

    def __init__(self, program: Sequence[str], method: StartMethod) -> None:
        self._program = list(program)
        self._flags, _ = split(sys.orig_argv)
        self.obstacle: str | None = None
        self._zygote: Zygote | None = None
        self._requests: deque[_Request] = deque()
        self._cold: dict[int, subprocess.Popen[bytes]] = {}
        self._selector: selectors.BaseSelector | None = None
        self._on_started: Callable[[int, Key], None] = lambda pid, key: None
        if method == "spawn":
            return
        preload()
        self.obstacle = _obstacle()
        if self.obstacle is None:
            self._zygote = Zygote.fork_here()
        elif method == "fork":
            raise RuntimeError(f"`start_method='fork'` is not possible here: {self.obstacle}. Use 'auto' or 'spawn'.")

    def watch(self, selector: selectors.BaseSelector, on_started: Callable[[int, Key], None]) -> None:
        """Call ``on_started(pid, key)`` from the loop over ``selector`` for each process that runs."""
        self._selector = selector
        self._on_started = on_started
        if self._zygote is not None:
            selector.register(self._zygote, selectors.EVENT_READ, self._on_readable)

    def start(self, key: Key, env: Mapping[str, str], stdio: Stdio) -> None:
        """Start one process; the descriptors stay open here."""
        stdin, stdout, stderr = (os.dup(descriptor) for descriptor in stdio)
        request = _Request(key, env, (stdin, stdout, stderr))
        if self._zygote is not None:
            try:
                self._zygote.request(self._program, env, os.getcwd(), request.stdio)
            except ConnectionError:
                self._lose_zygote()
            else:
                self._requests.append(request)
                return
        self._start_cold(request)

    def settle(self) -> None:
        """Return once every start that was asked for has been reported."""
        while self._requests:
            self._take_reply()

    def forget(self, pid: int) -> None:
        """Note that ``pid`` was reaped by a ``waitpid`` for every child."""
        process = self._cold.pop(pid, None)
        if process is not None:
            process.returncode = 0  # or it would try to reap a process that is not there
        if self._zygote is not None and pid == self._zygote.pid:
            self._lose_zygote()

    def close(self) -> None:
        """End the zygote; may be called twice."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            if self._selector is not None:
                self._selector.unregister(zygote)
            zygote.close()

    def _on_readable(self) -> None:
        assert self._zygote is not None
        if select.select([self._zygote], [], [], 0.0)[0]:  # else `settle` was called in the meantime
            self._take_reply()

    def _take_reply(self) -> None:
        assert self._zygote is not None
        try:
            pid = self._zygote.reply()
        except ConnectionError:
            self._lose_zygote()
            return
        request = self._requests.popleft()
        self._close(request)
        self._on_started(pid, request.key)

    def _lose_zygote(self) -> None:
        """Go on without: what it was asked for and did not do starts from nothing."""
        assert self._zygote is not None
        log.warning("Respawns take longer from now on: the process that forks ranks (pid %d) is gone.", self._zygote.pid)
        with contextlib.suppress(ProcessLookupError):  # one that only stopped answering must not fork a second rank later
            os.kill(self._zygote.pid, signal.SIGKILL)
        self.close()
        requests, self._requests = self._requests, deque()
        for request in requests:
            self._start_cold(request)

    def _start_cold(self, request: _Request) -> None:
        parent = os.getpid()
        stdin, stdout, stderr = request.stdio
        process = subprocess.Popen(
            [sys.executable, *self._flags, *self._program],
            env={"PYTHONUNBUFFERED": "1", **request.env},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent),
        )
        self._close(request)
        self._cold[process.pid] = process
        self._on_started(process.pid, request.key)

    @staticmethod
    def _close(request: _Request) -> None:
        for descriptor in request.stdio:
            os.close(descriptor)


def _obstacle() -> str | None:
    """Return what makes forking this process unsafe, or None."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if (count := num_threads()) > 1:
        return f"the imports started {count - 1} threads (OPENBLAS_NUM_THREADS=1 may avoid that)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA"
    return None
