"""How long a step takes without faults, against Lightning's own ``ddp``, or ``ModelParallelStrategy`` if it is sharded.

Runs of both alternate, since the machine's speed drifts; the ratio is of the medians over all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_WARM_UP = 20


def run(strategy: str, size: str, steps: int, devices: int, shard_size: int, more: Sequence[str] = ()) -> list[float]:
    """Return the durations of the steps of one training, in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        times = Path(directory) / "times.json"
        command = [sys.executable, "-m", "benchmarks.workload", "--strategy", strategy, "--size", size]
        command += ["--steps", str(steps), "--devices", str(devices), "--times", str(times), "--directory", directory]
        command += ["--shard-size", str(shard_size), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if finished.returncode:
            sys.exit(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stdout}\n{finished.stderr}")
        durations: list[float] = json.loads(times.read_text())
        return durations[_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--shard-size", type=int, default=1, help="Ranks of a replica; all devices, since the other has one."
    )
    parser.add_argument("--sizes", nargs="+", choices=["0.1M", "10M"], default=["0.1M", "10M"])
    options = parser.parse_args()
    other = "ddp" if options.shard_size == 1 else "model_parallel"
    result: dict[str, float] = {}
    for size, steps in (("0.1M", 600), ("10M", 60)):
        if size not in options.sizes:
            continue
        durations: dict[str, list[float]] = {"ft": [], other: []}
        ratios = []
        for number in range(options.rounds):
            medians = {}
            for strategy in ("ft", other) if number % 2 else (other, "ft"):
                steps_taken = run(strategy, size, steps, options.devices, options.shard_size)
                durations[strategy] += steps_taken
                medians[strategy] = statistics.median(steps_taken)
            ratios.append(medians["ft"] / medians[other])
            print(
                f"{size} round {number}: ft {1e3 * medians['ft']:.3f} ms, {other} {1e3 * medians[other]:.3f} ms", flush=True
            )
        median = {strategy: statistics.median(values) for strategy, values in durations.items()}
        result[f"ratio_{size}"] = round(median["ft"] / median[other], 4)
        result[f"ratio_of_rounds_{size}"] = round(statistics.median(ratios), 4)
        result |= {f"{strategy}_ms_{size}": round(1e3 * value, 3) for strategy, value in median.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
