"""What validation costs a step, for ``benchmarks.rerun``: one training of two ranks, validated every other four steps.

The machine's speed drifts from second to second by more than validation costs, so each four steps are compared with the four
before and after them, of the same processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from benchmarks.workload import Network, Regression
from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation

_BLOCK = 4  # steps
_SETTLING = 1  # first step of each, which is not counted


class EveryOtherBlock(Callback):
    """Validates every other four steps, and writes down how long each took.

    Args:
        path: Where rank 0 writes a list of blocks as JSON.

    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._validation = RerunValidation()
        self._blocks: list[list[float]] = []
        self._last = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % _BLOCK == 0:
            self._validation.teardown(trainer, pl_module, "fit")
            if batch_idx // _BLOCK % 2:
                self._validation.on_train_start(trainer, pl_module)
            self._blocks.append([])

    def on_train_batch_end(self, *args: Any) -> None:
        now = time.perf_counter()
        self._blocks[-1].append(now - self._last)
        self._last = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation.teardown(trainer, pl_module, "fit")
        if trainer.is_global_zero:
            Path(self._path).write_text(json.dumps([block[_SETTLING:] for block in self._blocks]))


def measure(size: str, blocks: int, shard_size: int) -> dict[str, Any]:
    """Return how long a step takes with validation, over one without."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "times.json"
        arguments = [str(path), "--size", size, "--blocks", str(blocks), "--shard-size", str(shard_size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.rerun_overhead", *arguments]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if finished.returncode:
            sys.exit(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stdout}\n{finished.stderr}")
        medians = [statistics.median(block) for block in json.loads(path.read_text())]
    ratios = [2 * medians[index] / (medians[index - 1] + medians[index + 1]) for index in range(1, len(medians) - 1, 2)]
    return {
        f"overhead_{size}": round(statistics.median(ratios), 4),
        "quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)[::2]],
        "ms": round(1e3 * statistics.median(medians[::2]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="Where the durations of steps are written.")
    parser.add_argument("--size", default="10M")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--shard-size", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FTStrategy(options.shard_size),
        max_epochs=1,
        callbacks=[EveryOtherBlock(options.path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Regression((2 * options.blocks + 1) * _BLOCK * 16 * 2)
    trainer.fit(Network(options.size), DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
