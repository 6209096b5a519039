"""Trainings that lose ranks all the time: a kill every three seconds on average, rank 0 too, pairs within 5 ms too.

Each round is one training with options drawn from the seed (accumulation, workers, validation and checkpoints). It counts
what must not happen: ``hangs``, ``divergences`` (ranks whose weights or optimizer state differ at the same step, steps lost
or described differently), ``samples_twice`` and ``samples_never`` (batches, per epoch). ``python -m benchmarks.soak
--seed N`` repeats the draws of an earlier run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.killer import Killer
from lightning_ft.events.audit import audit
from lightning_ft.events.log import read_events

_ROUND_SECONDS = 60.0
_MEAN_SECONDS_BETWEEN_KILLS = 3.0
_PAIRS = 0.25


def run_round(seed: int, seconds: float) -> Counter[str]:
    """Run one training for about ``seconds`` and return what happened in it."""
    chance = random.Random(seed)
    devices = chance.choice([3, 3, 4])
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        command = [sys.executable, "-m", "benchmarks.workload", "--strategy", "ft", "--size", "0.01M"]
        command += ["--devices", str(devices), "--work", "0.01", "--steps", "1000000", "--max-restarts", "100000"]
        command += ["--epoch-steps", str(chance.choice([40, 150])), "--accumulate", str(chance.choice([1, 1, 3]))]
        command += ["--workers", str(chance.choice([0, 0, 0, 1])), "--stop-file", str(root / "stop")]
        command += ["--directory", directory, *(["--validate"] if chance.random() < 0.7 else [])]
        print(f"seed {seed}: {' '.join(command[3:])}", flush=True)
        log = root / "output.txt"
        with open(log, "wb") as output:
            job = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
            )
        killer = Killer(root)
        _kill_for(seconds, chance, killer, job)
        (root / "stop").touch()
        counts = Counter(faults=killer.num_killed)
        try:
            job.wait(timeout=90)
        except subprocess.TimeoutExpired:
            counts["hangs"] += 1
            job.kill()
            job.wait()
        if job.returncode:
            counts["failures"] += 1
        if killer.directory is not None:
            counts += _check(killer.directory)
        bad = {key: value for key, value in counts.items() if key not in ("faults", "joins", "steps") and value}
        if bad:
            keep = Path(f"soak_{seed}")
            subprocess.run(["cp", "-r", directory, str(keep)], check=False)
            print(f"seed {seed} went wrong: {bad}; kept {keep}", flush=True)
            print(log.read_text(errors="replace")[-4000:], flush=True)
        return counts


def _kill_for(seconds: float, chance: random.Random, killer: Killer, job: subprocess.Popen[bytes]) -> None:
    start_up = time.monotonic() + 60
    while not killer.settled() and job.poll() is None and time.monotonic() < start_up:
        time.sleep(0.2)
    end = time.monotonic() + seconds
    while job.poll() is None and time.monotonic() < end:
        time.sleep(min(chance.expovariate(1 / _MEAN_SECONDS_BETWEEN_KILLS), max(0.0, end - time.monotonic())))
        settled = killer.settled()
        victims = chance.sample(sorted(settled), min(2 if chance.random() < _PAIRS else 1, max(0, len(settled) - 1)))
        killer.kill((slot, settled[slot]) for slot in victims)  # somebody who holds the state must be left


def _check(directory: Path) -> Counter[str]:
    events = read_events(directory)
    record = audit(events)
    counts = Counter(joins=len(record.joins), steps=len(record.steps))
    digests: dict[int, set[str]] = {}
    for event in events:
        if event["event"] == "checksum":
            digests.setdefault(event["step"], set()).add(event["digest"])
    counts["divergences"] = sum(len(values) > 1 for values in digests.values())
    counts["divergences"] += len(record.steps_lost) + len(record.conflicts)
    last = max(record.epochs, default=0)  # training stopped somewhere in it
    for number, epoch in record.epochs.items():
        counts["samples_twice"] += len(epoch.twice)
        counts["samples_never"] += len(epoch.never) if number != last else 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    total: Counter[str] = Counter(hangs=0, failures=0, divergences=0, samples_twice=0, samples_never=0)
    seed = options.seed
    while (left := end - time.monotonic()) > 5:
        total.update(run_round(seed, min(_ROUND_SECONDS, left)))
        seed += 1
    result = {key: total[key] for key in ("faults", "hangs", "divergences", "samples_twice", "samples_never")}
    print(json.dumps({**result, "failures": total["failures"], "joins": total["joins"], "steps": total["steps"]}))
    if any(total[key] for key in ("hangs", "failures", "divergences", "samples_twice", "samples_never")):
        sys.exit(1)


if __name__ == "__main__":
    main()
