"""Keeps a loader's workers at work when every process of the job is told to end: the step under way needs its batch."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.context import (
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from typing import Any

_Init = Callable[[int], None] | None
_SECONDS_TO_END = 1.0


def shield_workers(loader: Any) -> None:
    """Have the workers of ``loader`` end by SIGTERM only if their own process sends it; cluster managers send it to all."""
    init = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(init, _ShieldedStart):
        loader.worker_init_fn = _ShieldedStart(init)
        context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
        if type(context) in _SHIELDED:
            loader.multiprocessing_context = _SHIELDED[type(context)]()


def start_of_workers(loader: Any) -> Callable[[int], None] | None:
    """Return what the user or Lightning has a worker of ``loader`` do first, if it has workers that do anything."""
    init = getattr(loader, "worker_init_fn", None)
    return init.init if isinstance(init, _ShieldedStart) else init


class _ShieldedStart:
    """What a worker does first.

    Args:
        init: What it would do first otherwise.

    """

    def __init__(self, init: _Init) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed, args=(os.getppid(),), daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _heed(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class _Shielded:
    """A process in which no thread is interrupted by SIGTERM, not even those that libraries start at once in each child."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()  # type: ignore[misc]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        popen = self._popen  # type: ignore[attr-defined]
        popen.terminate = partial(_terminate, popen)


def _terminate(popen: Any) -> None:
    """Ask for the end, which takes the interpreter; one that is stuck is killed."""
    type(popen).terminate(popen)
    if popen.wait(_SECONDS_TO_END) is None:
        popen.kill()


class _ShieldedFork(_Shielded, ForkProcess):
    pass


class _ShieldedSpawn(_Shielded, SpawnProcess):
    pass


class _ShieldedForkServer(_Shielded, ForkServerProcess):
    pass


class _ShieldedForkContext(ForkContext):
    Process = _ShieldedFork


class _ShieldedSpawnContext(SpawnContext):
    Process = _ShieldedSpawn


class _ShieldedForkServerContext(ForkServerContext):
    Process = _ShieldedForkServer


_SHIELDED: dict[type, Callable[[], Any]] = {
    ForkContext: _ShieldedForkContext,
    SpawnContext: _ShieldedSpawnContext,
    ForkServerContext: _ShieldedForkServerContext,
}
