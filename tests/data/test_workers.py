"""Which signals end the workers of a loader."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from lightning_ft.data.workers import shield_workers

DATA = TensorDataset(torch.arange(64.0))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def terminate_from_outside(iterator: Any) -> None:
    subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in iterator._workers)], check=True)


def test_worker_outlives_it_in_threads_of_libraries_too() -> None:
    starts_threads = True

    def start_thread() -> None:  # as libraries do in each child, before anything of the worker runs
        if starts_threads:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    loader = DataLoader(DATA, batch_size=2, num_workers=2)
    shield_workers(loader)
    os.register_at_fork(after_in_child=start_thread)
    iterator: Any = iter(loader)
    starts_threads = False
    first = [next(iterator), next(iterator)]  # of each worker
    for _ in range(5):
        terminate_from_outside(iterator)
    assert len([*first, *iterator]) == 32
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_outlives_a_termination_that_is_not_its_own_process_s(method: str) -> None:
    loader = DataLoader(DATA, batch_size=2, num_workers=1, multiprocessing_context=method)
    shield_workers(loader)
    shield_workers(loader)
    iterator: Any = iter(loader)
    first = next(iterator)
    terminate_from_outside(iterator)
    assert len([first, *iterator]) == 32
    iterator = iter(loader)
    next(iterator)
    (worker,) = iterator._workers
    assert worker.is_alive()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


def test_a_worker_whose_interpreter_is_stuck_ends_too_when_its_process_wants_it() -> None:
    reached: Any = torch.zeros(1).share_memory_()

    def get_stuck(worker_id: int) -> None:
        reached[0] = 1
        ctypes.PyDLL(None).sleep(1000)  # never lets other threads run

    loader = DataLoader(DATA, batch_size=2, num_workers=1, worker_init_fn=get_stuck)
    shield_workers(loader)
    iterator: Any = iter(loader)
    wait_until(lambda: bool(reached.all()))
    (worker,) = iterator._workers
    _remove_worker_pids(id(iterator))  # as torch does before: or its handler of SIGCHLD raises wherever this process is
    iterator._worker_pids_set = False
    worker.terminate()
    worker.join(30)
    assert worker.exitcode is not None
