"""Keeps a loader's workers at work when every process of the job is told to end: the step under way needs its batch."""

import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

_Init = Callable[[int], None] | None


def shield_workers(loader: Any) -> None:
    """Have the workers of ``loader`` end by SIGTERM only if their own process sends it; cluster managers send it to all."""
    init = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(init, _ShieldedStart):
        _shield_forks()
        loader.worker_init_fn = _ShieldedStart(init)


@cache
def _shield_forks() -> None:
    """Have the threads that libraries start in the child of a fork leave SIGTERM to those of Python."""
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore)


class _ShieldedStart:
    """What a worker does first.

    Args:
        init: What it would do first otherwise.

    """

    def __init__(self, init: _Init) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        # For threads that block nothing nevertheless: there it must do nothing.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed, args=(os.getppid(),), daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _heed(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
