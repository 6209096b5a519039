"""What our loaders cost: a batch against one of a plain DataLoader, the size of a position, a resumption far into an epoch.

``ratio`` is that of the loader under `LoaderPosition`, ``elastic_ratio`` that of a rank of `FTStrategy`, in a job of 1, 8
and 64 ranks. ``deal_us`` is what a rank of as many spends on who trains what, a batch: a take and a commit, and, as
training does, two questions how many there are left; ``deal_constant_us`` is that with ``global_batch="constant"``.
"""

import argparse
import json
import pickle
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.resumable import ResumableLoader
from lightning_ft.data.rows import RowPlan
from lightning_ft.data.tickets import TicketPlan


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


class Elastic:
    """The loader of a rank of a job, each batch of which is a step."""

    num_slots = 1

    def __init__(self, source: DataLoader[Any]) -> None:
        data: Samples = source.dataset  # type: ignore[assignment]
        shared = Samples(data.count * self.num_slots)
        sampler: DistributedSampler[Any] = DistributedSampler(shared, self.num_slots, 0)
        loader = DataLoader(shared, batch_size=32, sampler=sampler, num_workers=source.num_workers)
        self.loader = ElasticLoader(loader, 0, self.num_slots, lambda: 0, agree=lambda draw: draw())
        self.members = tuple(range(self.num_slots))

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            self.loader.commit(self.members)

    def close(self) -> None:
        self.loader.close()


class ElasticOf8(Elastic):
    num_slots = 8


class ElasticOf64(Elastic):
    num_slots = 64


class Resumable:
    """The loader under `LoaderPosition`."""

    def __init__(self, source: DataLoader[Any]) -> None:
        self.loader = ResumableLoader(source, lambda: 0)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def close(self) -> None:
        end_workers(self.loader._batches)


class Plain:
    """The user's own."""

    def __init__(self, source: DataLoader[Any]) -> None:
        self.batches = iter(source)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches

    def close(self) -> None:
        end_workers(self.batches)


def ratios(num_workers: int, rounds: int, num_blocks: int, block: int = 20) -> dict[str, float]:
    """Of the seconds of a batch to those of a plain loader, whose batches are taken in turns with ours.

    Blocks of a few batches alternate, here and there in another order, since the machine's speed drifts within a second;
    rounds do, since workers that were started at another time are faster or slower for good.
    """
    kinds: list[type[Any]] = [Plain, Resumable, Elastic, ElasticOf8, ElasticOf64]
    seconds: dict[type[Any], list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        data = Samples(32 * (num_blocks * block + 2))
        order = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
        made = {kind: kind(DataLoader(data, batch_size=32, shuffle=True, num_workers=num_workers)) for kind in order}
        batches = {kind: iter(loader) for kind, loader in made.items()}
        for each in batches.values():
            next(each)  # the start of workers is not what a batch costs
        for turn in range(num_blocks):
            for kind in order if turn % 2 else reversed(order):
                started = time.perf_counter()
                for _ in range(block):
                    next(batches[kind])
                seconds[kind].append(time.perf_counter() - started)
        for loader in made.values():
            loader.close()  # or they end beside what follows
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        f"ratio_workers_{num_workers}": round(medians[Resumable] / medians[Plain], 3),
        f"elastic_ratio_workers_{num_workers}": round(medians[Elastic] / medians[Plain], 3),
        f"elastic_ratio_workers_{num_workers}_slots_8": round(medians[ElasticOf8] / medians[Plain], 3),
        f"elastic_ratio_workers_{num_workers}_slots_64": round(medians[ElasticOf64] / medians[Plain], 3),
        f"plain_us_workers_{num_workers}": round(1e6 * medians[Plain] / block, 1),
    }


def deal_us(kind: type[Any], num_slots: int, num_batches: int = 20_000, rounds: int = 7) -> float:
    """Microseconds of a batch's questions to the plan of a job in which nobody dies or joins."""
    live, seconds = tuple(range(num_slots)), []
    for _ in range(rounds):
        plan = kind(num_batches * num_slots, num_slots)
        started = time.perf_counter()
        for _ in range(num_batches):
            plan.take(live).get(0)
            plan.remaining_steps(live)
            plan.commit(live)
            plan.remaining_steps(live)
        seconds.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(seconds) / num_batches, 2)


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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=120)
    arguments = parser.parse_args()
    resumed, permutation = resume_seconds(10**6)
    result = {
        **ratios(0, arguments.rounds, arguments.blocks),
        **ratios(2, arguments.rounds, arguments.blocks),
        **{f"deal_us_slots_{count}": deal_us(TicketPlan, count) for count in (1, 8, 64)},
        **{f"deal_constant_us_slots_{count}": deal_us(RowPlan, count) for count in (1, 8, 64)},
        "state_bytes": state_bytes(),
        "resume_s_at_1e6": round(resumed, 3),
        "permutation_s": round(permutation, 3),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
