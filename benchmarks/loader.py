"""What LoaderPosition costs: a batch against a plain DataLoader, the size of a position, and a resumption far into an epoch.

Rounds of both loaders alternate, since the machine's speed drifts; a ratio is the median over the rounds.
"""

import argparse
import json
import pickle
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.resumable import ResumableLoader
from lightning_ft.data.tickets import TicketPlan


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


def seconds_per_batch(loader: Any, num_batches: int) -> float:
    batches = iter(loader)
    next(batches)  # the start of workers is not what a batch costs
    started = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    seconds = (time.perf_counter() - started) / num_batches
    end_workers(getattr(batches, "_batches", batches))  # or they end beside the measurement that follows
    return seconds


def ratio(num_workers: int, rounds: int, num_batches: int) -> float:
    """Of the seconds of a batch."""
    ratios = []
    for number in range(rounds):
        loader = DataLoader(Samples(32 * (num_batches + 2)), batch_size=32, shuffle=True, num_workers=num_workers)
        pair = [ResumableLoader(loader, lambda: 0), loader]
        first, second = pair[number % 2 :] + pair[: number % 2]
        taken = {id(each): seconds_per_batch(each, num_batches) for each in (first, second)}
        ratios.append(taken[id(pair[0])] / taken[id(pair[1])])
    return statistics.median(ratios)


def state_bytes() -> int:
    """Of the position of 1,024 slots in an epoch of 10^9 samples of which two died."""
    plan = TicketPlan(num_tickets=10**9, num_slots=1024)
    live = list(range(1024))
    for step in range(50):
        plan.take(live)
        if step in (20, 30):
            plan.remove(live.pop(step))
        plan.commit(live)
    return len(pickle.dumps(plan.state_dict()))


def resume_seconds(batch: int) -> tuple[float, float]:
    """Seconds until the first batch of a loader that resumes at ``batch``, and of drawing the order alone."""
    data = Samples(batch + 100)
    position = {"kind": "map-style", "iterations": 1, "taken": batch}
    made = ResumableLoader(DataLoader(data, batch_size=1, shuffle=True), lambda: 0)
    iter(made)
    next(made)
    position |= {name: value for name, value in made.position(0, between_epochs=False).items() if name not in position}
    loader = ResumableLoader(DataLoader(data, batch_size=1, shuffle=True), lambda: 0)
    loader.resume(position)
    started = time.perf_counter()
    next(iter(loader))
    resumed = time.perf_counter() - started
    started = time.perf_counter()
    torch.randperm(len(data)).tolist()
    return resumed, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    resumed, permutation = resume_seconds(10**6)
    result = {
        "ratio_workers_0": round(ratio(0, arguments.rounds, arguments.batches), 3),
        "ratio_workers_2": round(ratio(2, arguments.rounds, arguments.batches), 3),
        "state_bytes": state_bytes(),
        "resume_s_at_1e6": round(resumed, 3),
        "permutation_s": round(permutation, 3),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
