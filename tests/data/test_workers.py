"""Which signals end the workers of a loader."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.data.workers import shield_workers


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def block_nothing() -> None:
    """As the threads of libraries do that start some in the child of a fork."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    threading.Event().wait()


def test_worker_outlives_it_in_threads_of_libraries_too() -> None:
    starts_threads = True

    def start_thread() -> None:
        if starts_threads:
            threading.Thread(target=block_nothing, daemon=True).start()

    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=2, num_workers=2)
    shield_workers(loader)
    os.register_at_fork(after_in_child=start_thread)
    iterator: Any = iter(loader)
    starts_threads = False
    first = [next(iterator), next(iterator)]  # of each worker
    for _ in range(5):
        subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in iterator._workers)], check=True)
    assert len([*first, *iterator]) == 32


def test_worker_outlives_a_termination_that_is_not_its_own_process_s() -> None:
    started: Any = torch.zeros(2).share_memory_()

    def init(worker_id: int) -> None:
        started[worker_id] = os.getpid() - os.getppid()

    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=2, num_workers=2, worker_init_fn=init)
    shield_workers(loader)
    shield_workers(loader)
    iterator: Any = iter(loader)
    first = next(iterator)
    wait_until(lambda: bool(started.all()))
    workers = iterator._workers
    subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in workers)], check=True)
    assert len([first, *iterator]) == 32
    started.zero_()
    iterator = iter(loader)
    wait_until(lambda: bool(started.all()))
    workers = iterator._workers
    for worker in workers:
        assert worker.is_alive()
        worker.terminate()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
