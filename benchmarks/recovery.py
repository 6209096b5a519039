"""What a death and a return cost: kills of random ranks at random moments of a training with three replicas.

``stall_ms``: from the signal to the next commit of a survivor that knows of it, beyond a median step. ``respawn_s``: from
there to the new incarnation's first commit. ``join_gap_ms``: the others' longest step around the admission, beyond a median
one. ``steps_lost``: optimizer steps that no rank committed. With ``--stop SECONDS`` ranks are stopped (SIGSTOP) instead of
killed, and ``timeout`` is that long. With ``--pairs`` a rank of each of two replicas is killed at once, of different shards:
``regrouped`` is how often what was left of them became a replica in that very step. With ``--shard-size all`` there is one
replica of ``--devices`` ranks, which goes on from a snapshot: ``steps_rewound`` is how many steps each death cost,
``snapshot_overhead`` the ratio of step times with and without snapshots.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.killer import Killer
from lightning_ft.events.audit import Audit, audit
from lightning_ft.events.log import Events, read_events


def measure(options: argparse.Namespace) -> tuple[Audit, Events]:
    """Run one training with deaths; return what its events add up to, and the events."""
    chance, kills, stop = random.Random(options.seed), options.kills, options.stop
    shard_size = options.devices if options.shard_size == "all" else int(options.shard_size)
    num_ranks = shard_size * (1 if options.shard_size == "all" else options.replicas)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        command = [sys.executable, "-m", "benchmarks.workload", "--strategy", "ft", "--devices", str(num_ranks)]
        command += ["--size", options.size, "--shard-size", options.shard_size, "--work", str(options.work)]
        command += ["--steps", "100000", "--epoch-steps", "500", "--max-restarts", "1000"]
        command += ["--spares", str(options.spares), "--stop-file", str(root / "stop"), "--directory", directory]
        command += ["--timeout", str(stop)] if stop is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
            killer, gone = Killer(root), set[int]()
            deadline = time.monotonic() + 120 + 10 * kills
            while killer.num_faults < kills and job.poll() is None and time.monotonic() < deadline:
                time.sleep(chance.uniform(0.8, 1.6))
                settled = killer.settled()
                if len(settled) < num_ranks or gone & set(settled.values()):
                    continue
                victims = chance.sample(killer.replicas(), 2 if options.pairs else 1)
                for shard, replica in zip(chance.sample(range(shard_size), len(victims)), victims, strict=True):
                    slot = replica[shard]
                    gone.add(settled[slot])
                    killer.kill(slot, settled[slot], signal.SIGKILL if stop is None else signal.SIGSTOP)
                    print(f"kill {killer.num_faults} of {kills}: slot {slot}", flush=True)
            while len(killer.settled()) < num_ranks and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
            (root / "stop").touch()
            try:
                output, _ = job.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                job.kill()
                sys.exit("The training hung.")
            if job.returncode:
                sys.exit(f"The training ended with {job.returncode}:\n{output.decode()}")
        assert killer.directory is not None
        events = read_events(killer.directory)
        return audit(events), events


def count_regrouped(events: Events) -> int:
    """Return how many replicas were made of ranks of others that had lost some."""
    known: list[list[int]] = []
    count = 0
    for event in events:
        if event["event"] == "generation" and event["slot"] is None:
            new = [replica for replica in event["replicas"] if replica not in known]
            count += len(new) if event["reason"] == "death" else 0
            known = event["replicas"]
    return count


def snapshot_overhead(size: str, work: float, devices: int, rounds: int) -> float:
    """Return the time of ten steps with a snapshot over that of ten without, medians of alternating runs."""
    times: dict[int, list[float]] = {10: [], 1_000_000: []}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "times")
        for every in list(times) * rounds:
            command = [sys.executable, "-m", "benchmarks.workload", "--devices", str(devices), "--size", size]
            command += ["--shard-size", "all", "--snapshot-every", str(every), "--work", str(work), "--steps", "130"]
            command += ["--times", str(path), "--directory", directory]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
            steps = json.loads(path.read_text())[20:]
            times[every] += [sum(steps[first : first + 10]) for first in range(0, len(steps) - 9, 10)]
    return statistics.median(times[10]) / statistics.median(times[1_000_000])


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 95th percentile and maximum."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", default="0.1M")
    parser.add_argument("--work", type=float, default=0.01, help="Seconds that each step waits besides computing.")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--shard-size", default="1", help="Ranks of a replica, or `all`: see `--devices`.")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--devices", type=int, default=3, help="Ranks of the only replica.")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs for the cost of snapshots.")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--stop", type=float, default=None, metavar="SECONDS")
    options = parser.parse_args()
    record, events = measure(options)
    assert record.median_step is not None
    stalls = [1e3 * (d.recovery - record.median_step) for d in record.deaths if d.member and d.recovery is not None]
    gaps = [1e3 * join.gap for join in record.joins if join.gap is not None]
    result = {
        "stall_ms": spread(stalls),
        "steps_lost": len(record.steps_lost) + len(record.conflicts),
        "respawn_s": spread([death.respawn for death in record.deaths if death.respawn is not None]),
        "join_gap_ms": spread(gaps),
        "deaths": sum(death.member for death in record.deaths),
        "regrouped": count_regrouped(events),
        "joins": len(record.joins),
        "median_step_ms": round(1e3 * record.median_step, 2),
        "problems": record.problems(unfinished_epoch=True),
    }
    if options.shard_size == "all":
        lost = {event["step"]: event["lost"] for event in events if event["event"] == "rewound"}
        result["steps_rewound"] = spread(list(lost.values()))
        overhead = snapshot_overhead(options.size, options.work, options.devices, options.rounds)
        result["snapshot_overhead"] = round(overhead, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
