"""Whether restarts are judged right, on real trainings, and what the event log costs.

    python -m benchmarks.health --restarts 200

Real trainings (those of :mod:`benchmarks.false_alarms`) are interrupted at random steps. After a clean restart a training
just goes on. Else it goes on from there with a fault, for as many steps as a verdict takes: weights damaged so that the loss
more than doubles (``spike``), a NaN among them, a loss that is averaged wrongly (``drop``), an update that ruins the second
step, damaged weights while too little is known (``warm-up``).
"""

import argparse
import copy
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

from benchmarks.false_alarms import TRAININGS
from benchmarks.workload import Network
from lightning_ft.events.log import EventLog
from lightning_ft.health.restarts import RestartWatch

WINDOW = 20
FAULTS = {"spike": ("spike", "nan"), "drop": ("drop",), "nan": ("nan",), "second step": ("spike", "nan")}
WARM = 24
"""Steps that a restart must have before it to be decided."""


class Fork:
    """Goes on from the state that a training has now, and comes back to it."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, step_of: Callable[[int], tuple[float, float]]):
        self.network, self.optimizer, self.step_of = network, optimizer, step_of
        self.before = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())

    def rewind(self) -> None:
        self.network.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.before[1]))

    def run(self, fault: str, step: int, highest: float) -> list[dict[str, float]]:
        """Return the values of the steps after a restart with this fault."""
        for attempt in range(30):
            self.rewind()
            values = self._run(fault, step, 2.0**attempt)
            at = 1 if fault == "second step" else 0
            if fault in ("drop", "nan") or not values[at]["loss"] <= 2.0 * highest:
                break
        self.rewind()
        return values

    def _run(self, fault: str, step: int, size: float) -> list[dict[str, float]]:
        parameters = list(self.network.parameters())
        with torch.no_grad():
            if fault in ("spike", "warm-up"):
                for parameter in parameters:
                    parameter.add_(torch.randn_like(parameter) * 0.05 * size)
            elif fault == "nan":
                parameters[0].view(-1)[0] = float("nan")
        values = []
        for i in range(WINDOW):
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = 0.1 * size if fault == "second step" and i == 0 else rate
            loss, norm = self.step_of(step + i)
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scale = 0.1 if fault == "drop" else 1.0
            values.append({"loss": scale * loss, "grad_norm": scale * norm})
        return values


def verdict(state: dict[str, Any], step: int, values: list[dict[str, float]]) -> str:
    watch = RestartWatch(WINDOW)
    watch.load_state_dict(state)
    watch.restart(step, "resume")
    (found,) = filter(None, [watch.observe(step + offset, known) for offset, known in enumerate(values, 1)])
    return found.outcome


def judge(options: tuple[str, int, int, int]) -> list[tuple[str, str, str]]:
    """Return (fault or "clean", outcome, where) of restarts of one training."""
    name, seed, steps, restarts = options
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    chance = random.Random(f"{name} {seed}")
    network, optimizer, scheduler, loss_of = TRAININGS[name](torch.Generator().manual_seed(seed), steps)

    def step_of(step: int) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None])
        optimizer.step()
        return loss.item(), norm.item()

    places: dict[int, list[str]] = {}
    faults = [*FAULTS, "warm-up"]
    for index in range(restarts):
        fault = faults[index % len(faults)]
        step = chance.randrange(1, 18) if fault == "warm-up" else chance.randrange(WARM, steps - WINDOW)
        places.setdefault(step, []).append(fault)
    clean = {chance.randrange(1, steps - WINDOW) for _ in range(restarts)}
    watch, found, curve = RestartWatch(WINDOW), [], []
    states: dict[int, Any] = {}
    for step in range(steps):
        if step in places or step in clean:
            states[step] = copy.deepcopy(watch.state_dict())
        for fault in places.get(step, ()):
            highest = max(values["loss"] for values in curve[-64:])
            values = Fork(network, optimizer, step_of).run(fault, step, highest)
            found.append((fault, verdict(states[step], step, values), f"{name} {seed} at {step}"))
        loss, norm = step_of(step)
        curve.append({"loss": loss, "grad_norm": norm})
        watch.observe(step + 1, curve[-1])
        if scheduler is not None:
            scheduler.step()
    for step in clean:
        found.append(("clean", verdict(states[step], step, curve[step : step + WINDOW]), f"{name} {seed} at {step}"))
    return found


def is_right(fault: str, outcome: str, where: str) -> bool:
    if fault == "clean":
        step = int(where.rsplit(" ", 1)[1])
        return outcome == "continuous" or (outcome == "undecided" and step < WARM)
    return outcome == "undecided" if fault == "warm-up" else outcome in FAULTS[fault]


def event_log_overhead(num_steps: int = 20) -> dict[str, float]:
    """Return a step's time with the events of a step over that without, at 10M parameters."""
    network, loss = Network("10M"), nn.MSELoss()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    inputs, targets = torch.randn(16, 32), torch.randn(16, 8)
    times = []
    for _ in range(num_steps):
        since = time.perf_counter()
        loss(network.network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - since)
    with tempfile.TemporaryDirectory() as directory:
        events = EventLog(slot=0)
        events.open(directory)
        since = time.perf_counter()
        for step in range(1000):
            events.emit("step", step=step, epoch=0, tickets={0: [step], 1: [step]}, members=[0, 1])
            events.emit("metrics", step=step, loss=0.123456789, grad_norm=1.23456789)
        seconds = (time.perf_counter() - since) / 1000
        events.close()
        num_bytes = sum(file.stat().st_size for file in os.scandir(directory)) / 1000
    step = statistics.median(times)
    return {"event_log_overhead": round(1.0 + seconds / step, 5), "event_log_bytes_per_step": num_bytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--restarts", type=int, default=200, help="With a fault; as many clean ones.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    runs = [(name, seed) for seed in range(options.seeds) for name in TRAININGS]
    share = -(-options.restarts // len(runs))
    with get_context("spawn").Pool(options.processes) as pool:
        found = [
            judged for part in pool.imap_unordered(judge, [(*run, options.steps, share) for run in runs]) for judged in part
        ]
    wrong = [judged for judged in found if not is_right(*judged)]
    numbers: dict[str, Any] = {
        "verdicts": len(found),
        "verdicts_right": len(found) - len(wrong),
        "false_verdicts": sum(fault == "clean" for fault, _, _ in wrong),
        "clean": sum(fault == "clean" for fault, _, _ in found),
        "injected": sum(fault != "clean" for fault, _, _ in found),
        "wrong": wrong,
        **event_log_overhead(),
    }
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
