"""Trainings to which something happens all the time, a fault every three seconds on average, to rank 0 too.

Each round is one training with options and faults drawn from the seed. Kinds of faults, each from outside and at any moment:
``kill`` (SIGKILL), ``pair`` (two at once, or the second while the survivors recover from the first), ``stop`` (SIGSTOP),
``raise`` (an exception in one rank's ``training_step``), ``disk`` (for a second, nothing that one rank writes to a file
gets there, checkpoints included), ``all`` (SIGKILL to all ranks: they begin again), ``term`` (SIGTERM to the job or to one
rank, which ends all of it; it is started again and resumes). With ``--shard-size all`` the module is sharded.

It counts what must not happen: ``hangs``, ``failures`` (the job's exit code), ``divergences`` (ranks whose weights or
optimizer state differ at the same step, steps lost or described differently), ``samples_twice`` and ``samples_never``
(batches, per epoch), ``violations`` of the rules of ``lightning-ft report``. ``python -m benchmarks.soak --seed N`` repeats
the draws of a round that went wrong.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.killer import Killer
from lightning_ft.checkpoint.verify import damage
from lightning_ft.events.analysis import analyze
from lightning_ft.events.audit import audit
from lightning_ft.events.log import read_events

KINDS = ("kill", "pair", "all", "stop", "raise", "disk", "term")
FORBIDDEN = ("hangs", "failures", "divergences", "samples_twice", "samples_never", "violations")

_ROUND_SECONDS = 60.0
_MEAN_SECONDS_BETWEEN_FAULTS = 3.0
_TIMEOUT = 5.0  # generous for a loaded machine
_FULL_DISK_SECONDS = 1.0
_LONGEST_PAUSE_IN_A_PAIR = 0.1
_PROGRESS_SECONDS = 10.0
_SECONDS_TO_START = 90.0
_SECONDS_TO_END = 90.0
_SHORTEST_RUN = 3.0
_FAR = 1_000_000  # more than a run has processes or batches
_ASKED_TO_STOP = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Strike:
    """One fault of a round's plan.

    Args:
        after: Seconds after the one before.
        kind: One of :data:`KINDS`.
        who: Picks the victim: a fraction of the ranks that take part then, by slot.
        pause: Seconds until the second death of a pair.

    """

    after: float
    kind: str
    who: float
    pause: float


@dataclass(frozen=True)
class Plan:
    """A round: how the training is started, and what happens to it."""

    arguments: list[str]
    strikes: list[Strike]

    @classmethod
    def draw(cls, seed: int, kinds: list[str], shard_size: str) -> "Plan":
        """Return the plan of ``seed``."""
        chance = random.Random(seed)
        arguments = ["--devices", str(chance.choice([3, 3, 4])), "--epoch-steps", str(chance.choice([40, 150]))]
        arguments += ["--accumulate", str(chance.choice([1, 1, 3])), "--workers", str(chance.choice([0, 0, 0, 1]))]
        arguments += ["--validate"] if chance.random() < 0.7 else []
        arguments += ["--shard-size", shard_size] if shard_size != "1" else []
        strikes = [
            Strike(
                chance.expovariate(1 / _MEAN_SECONDS_BETWEEN_FAULTS),
                chance.choice(kinds),
                chance.random(),
                chance.choice([0.0, chance.uniform(0.0, _LONGEST_PAUSE_IN_A_PAIR)]),
            )
            for _ in range(1000)
        ]
        return cls(arguments, strikes)


def run_round(seed: int, seconds: float, kinds: list[str], shard_size: str) -> Counter[str]:
    """Run one training for about ``seconds`` and return what happened in it."""
    plan = Plan.draw(seed, kinds, shard_size)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        command = [sys.executable, "-m", "benchmarks.workload", "--strategy", "ft", "--size", "0.01M", "--work", "0.01"]
        command += ["--steps", "1000000", "--max-restarts", "100000", "--timeout", str(_TIMEOUT)]
        command += ["--stop-file", str(root / "stop"), "--directory", directory, *plan.arguments]
        command += ["--resume"] if "term" in kinds else []
        print(f"seed {seed}: {' '.join(plan.arguments)}", flush=True)
        log = root / "output.txt"
        counts: Counter[str] = Counter()
        strikes = iter(plan.strikes)
        runs: list[Path] = []
        while True:
            killer = Killer(root)
            with open(log, "ab") as output:
                job = subprocess.Popen(
                    command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
                )
            _wait_for_start(killer, job)
            started = time.monotonic()
            is_asked = _strike_for(max(seconds, _SHORTEST_RUN), strikes, killer, job, counts)
            seconds -= time.monotonic() - started
            if not is_asked:
                (root / "stop").touch()
            try:
                job.wait(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                counts["hangs"] += 1
                job.kill()
                job.wait()
            counts["failures"] += job.returncode != (_ASKED_TO_STOP if is_asked else 0)
            runs += [killer.directory] if killer.directory is not None else []
            if not is_asked or counts["failures"]:
                break
        counts.update(_check(runs))
        if bad := {key: counts[key] for key in FORBIDDEN if counts[key]}:
            keep = Path(f"soak_{seed}")
            subprocess.run(["cp", "-r", directory, str(keep)], check=False)
            print(f"seed {seed} went wrong: {bad}; kept {keep}\n{log.read_text(errors='replace')[-4000:]}", flush=True)
        return counts


def _wait_for_start(killer: Killer, job: subprocess.Popen[bytes]) -> None:
    """Return once a step is committed: what a rank raises before that is the program's fault, and ends the job."""
    start_up = time.monotonic() + _SECONDS_TO_START
    while not killer.has_stepped and job.poll() is None and time.monotonic() < start_up:
        time.sleep(0.2)


def _strike_for(
    seconds: float, strikes: Iterator[Strike], killer: Killer, job: subprocess.Popen[bytes], counts: Counter[str]
) -> bool:
    """Strike for ``seconds``; return whether the job was asked to stop before they were over."""
    end, tell_at = time.monotonic() + seconds, time.monotonic() + _PROGRESS_SECONDS
    harmed: set[int] = set()
    for strike in strikes:
        time.sleep(min(strike.after, max(0.0, end - time.monotonic())))
        if job.poll() is not None or time.monotonic() >= end:
            return False
        before = killer.num_faults
        if strike.kind == "term":
            if not _ask_to_stop(strike, killer, job):
                continue
        else:
            _strike(strike, killer, harmed)
        counts["faults"] += killer.num_faults - before
        counts[strike.kind] += 1
        if strike.kind == "term":
            return True
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + _PROGRESS_SECONDS
            print(f"  {end - time.monotonic():3.0f} s left, {counts['faults']} faults", flush=True)
    return False


def _ask_to_stop(strike: Strike, killer: Killer, job: subprocess.Popen[bytes]) -> bool:
    """Send SIGTERM to the supervisor or, in half of the cases, to one rank; return whether there was one."""
    settled = killer.settled()
    if not settled:
        return False
    victim = sorted(settled)[int(strike.who * len(settled))]
    killer.kill(victim, settled[victim] if strike.pause else job.pid, signal.SIGTERM)
    return True


def _strike(strike: Strike, killer: Killer, harmed: set[int]) -> None:
    """Do it, unless nobody would be left who holds the state and is not ``harmed``."""
    settled = killer.settled()
    if strike.kind == "all":
        for slot, pid in settled.items():
            killer.kill(slot, pid)
        return
    order = sorted(settled)
    victim = order[int(strike.who * len(order))] if order else -1
    sound = [slot for slot, pid in settled.items() if pid not in harmed and slot != victim]
    if not sound:
        return
    harmed.add(settled[victim])
    if strike.kind == "stop":
        killer.kill(victim, settled[victim], signal.SIGSTOP)
    elif strike.kind == "raise":
        killer.have_raise(victim)
    elif strike.kind == "disk":
        killer.fill_disk(settled[victim])
        time.sleep(_FULL_DISK_SECONDS)
        killer.fill_disk(settled[victim], full=False)
    else:
        killer.kill(victim, settled[victim], signal.SIGKILL)
        other = order[(order.index(victim) + 1) % len(order)]
        if strike.kind == "pair" and sound != [other]:
            time.sleep(strike.pause)
            killer.kill(other, settled[other], signal.SIGKILL)


def _check(runs: list[Path]) -> Counter[str]:
    """Return what is wrong with a training, and some numbers of it, by the events of its runs."""
    events = [event for number, run in enumerate(runs) for event in _renumbered(read_events(run), number)]
    record = audit(events)
    counts = Counter(joins=len(record.joins), steps=len(record.steps))
    digests: dict[int, set[str]] = {}
    for event in events:
        if event["event"] in ("rewound", "resumed"):  # later steps are taken again, perhaps by fewer ranks
            digests = {step: values for step, values in digests.items() if step <= event["step"]}
        elif event["event"] == "weights":
            digests.setdefault(event["step"], set()).add(event["digest"])
    counts["divergences"] = sum(len(values) > 1 for values in digests.values())
    counts["divergences"] += len(record.steps_lost) + len(record.conflicts)
    violations = analyze(runs[-1], damage).violations if runs else ()  # with those that it resumed
    for violation in violations:
        print(f"  {violation}", flush=True)
    counts["violations"] = len(violations)
    # Training stopped somewhere in it; a later one may have been begun by ranks that are gone, with all that they trained.
    last = max((number for number, epoch in record.epochs.items() if epoch.num_trained), default=0)
    for number, epoch in record.epochs.items():
        counts["samples_twice"] += len(epoch.twice)
        counts["samples_never"] += len(epoch.never) if number < last else 0
    return counts


def _renumbered(events: Iterable[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    """Tell processes and batches of one run from those of another: each run counts them from 0."""
    for event in events:
        later = {name: event[name] + number * _FAR for name in ("incarnation", "batch") if event.get(name) is not None}
        yield {**event, **later}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shard-size", default="1", help="Ranks of a replica, or `all`.")
    options = parser.parse_args()
    end = time.monotonic() + 60 * (options.minutes if not options.hours else 60 * options.hours)
    total: Counter[str] = Counter(dict.fromkeys(FORBIDDEN, 0))
    seed = options.seed
    while (left := end - time.monotonic()) > 5:
        total.update(run_round(seed, min(_ROUND_SECONDS, left), options.kinds, options.shard_size))
        seed += 1
    print(json.dumps({key: total[key] for key in ("faults", *FORBIDDEN, *KINDS, "joins", "steps")}))
    if any(total[key] for key in FORBIDDEN):
        sys.exit(1)


if __name__ == "__main__":
    main()
