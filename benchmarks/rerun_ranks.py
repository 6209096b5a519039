"""Faults in one of several ranks, for ``benchmarks.rerun``: all trainings run one after the other in the same processes.

python -m benchmarks.rerun --faults 36 --ranks 3

"""

import hashlib
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import rerun
from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.testing import Corruption, run_job

_TIMEOUT = 3600.0


class Recorder(Callback):
    """Writes down what was rejected after each batch: whoever is excluded takes nothing along that others did not write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_written = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        validation = next(callback for callback in trainer.callbacks if isinstance(callback, RerunValidation))
        rows = list(validation.rows)
        if len(rows) > self._num_written:
            with self._path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[self._num_written :])
            self._num_written = len(rows)


def inject(count: int, seed: int, num_ranks: int, shard_size: int, lasting_part: float) -> dict[str, Any]:
    """Inject ``count`` faults in a job of several ranks, and count what became of them."""
    result = rerun.new_result()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        options = {"faults": count, "seed": seed, "ranks": num_ranks, "shard_size": shard_size, "lasting": lasting_part}
        run_job(__file__, [json.dumps(options)], num_slots=num_ranks, directory=directory, timeout=_TIMEOUT).check()
        for number, (precision, accumulate, share) in enumerate(rerun.settings(count)):
            faults = rerun.plan(precision, accumulate, share, seed, num_ranks, lasting_part)
            texts = {line for path in directory.glob(f"rows_{number}_*") for line in path.read_text().splitlines()}
            rerun.tally(result, faults, accumulate, [json.loads(text) for text in sorted(texts)], precision)
            ended = [path.read_text() for path in directory.glob(f"weights_{number}_*_[01].txt")]
            pairs = {path.name.split("_")[3] for path in directory.glob(f"weights_{number}_*")}
            assert pairs == {"0.txt", "1.txt"}
            result["kept" if len(set(ended)) == 1 else "not_kept"] += 1
    return {**result, "missed": result["missed"][:20]}


def train(number: int, slot: int, options: dict[str, Any]) -> None:
    """Run the trainings of one setting: with all faults, with those that happen once, and without any."""
    precision, accumulate, share = rerun.settings(options["faults"])[number]
    num_ranks, shard_size = options["ranks"], options["shard_size"]
    faults = rerun.plan(precision, accumulate, share, options["seed"], num_ranks, options["lasting"])
    transient_only, steps = rerun.only_transient(faults, accumulate)
    trainings: list[tuple[list[Corruption], int, str]] = [
        (faults, rerun.num_steps(share), f"rows_{number}_{slot}"),
        (transient_only, steps, f"other_{number}_{slot}_0"),
        ([], steps, f"other_{number}_{slot}_1"),
    ]
    for chosen, length, name in trainings:
        strategy = FTStrategy(shard_size, max_restarts=10_000, min_replicas=num_ranks // shard_size)
        _, model = rerun.fit(
            precision,
            accumulate,
            length,
            chosen,
            num_ranks=num_ranks,
            with_norm=False,  # whose running statistics are each rank's own until the next step
            strategy=strategy,
            callbacks=[Recorder(Path(name))],
        )
        path = Path(name.replace("other", "weights") + ".txt")
        if name.startswith("other") and not path.exists():  # else a process before this one took part in that training
            weights = hashlib.sha256()
            for value in model.state_dict().values():
                weights.update((value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().tobytes())
            path.write_text(weights.hexdigest())


def main() -> None:
    options = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_ft"):
        logging.getLogger(name).setLevel(logging.ERROR)
    environment = RankEnvironment.of_process()
    assert environment is not None
    for number in range(len(rerun.settings(options["faults"]))):
        train(number, environment.slot, options)


if __name__ == "__main__":
    main()
