"""Rerun validation against injected faults and in clean runs, and what it costs.

    python -m benchmarks.rerun --faults 1000
    python -m benchmarks.rerun --faults 36 --ranks 3
    python -m benchmarks.rerun --faults 36 --ranks 4 --shard-size 2
    python -m benchmarks.rerun --faults 0 --overhead-blocks 150

``injected`` faults go wrong in loss, gradient, activation or batch: NaN, infinity, times a million, a flipped bit of the
exponent; in one run of a step or in each; with 1 and 3 batches a step, in float32, bfloat16 and float16 with a GradScaler.
``detected``: rejected in the step of the fault, before it was applied. ``attributed``: what is wrong once was called
transient, what is wrong each time reproducible; with several ranks, on which rank, and whether that or the data is to
blame: what a device computes wrongly each time has it excluded, within the step, and its process started again.
``kept``: trainings with transient faults only that ended with the weights, bit for bit, of those without.
``overhead_10M``: a step of 10M parameters with validation over one without.
"""

import argparse
import json
import logging
import random
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks import RerunValidation
from lightning_ft.rerun.states import RerunDiagnostic
from lightning_ft.testing import Corruption, Corruptions

_WARM_UP = 30  # steps
_EVERY = 3  # steps between two faults
_PLACES = ("loss", "gradient", "activation", "batch")
_KINDS = ("nan", "inf", "spike", "bit_flip")
_PRECISIONS = ("float32", "bfloat16", "float16")


class Network(LightningModule):
    def __init__(self, with_norm: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(32) if with_norm else nn.LayerNorm(32)
        self.net = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).float(), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    precision: str,
    accumulate: int,
    steps: int,
    faults: list[Corruption],
    *,
    num_ranks: int = 1,
    with_norm: bool = True,
    **more: Any,
) -> tuple[list[dict[str, Any]], Network]:
    """Return what was rejected in a training, and its module."""
    seed_everything(1, verbose=False)
    inputs = torch.randn(32 * steps * accumulate * num_ranks, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].sin()), batch_size=32)
    without = "assume_correct" if num_ranks == 1 else "checkpoint"
    validation = RerunValidation(without_opinion=without, on_spike="skip_batch", on_correct="skip_batch")
    options: dict[str, Any] = {"precision": "bf16-mixed"} if precision == "bfloat16" else {}
    if precision == "float16":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))]
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Corruptions(faults), validation, *more.pop("callbacks", [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
        **more,
    )
    model = Network(with_norm)
    trainer.fit(model, data)
    return list(validation.rows), model


def plan(
    precision: str, accumulate: int, count: int, seed: int, num_ranks: int = 1, lasting_part: float = 0.5
) -> list[Corruption]:
    generator = random.Random(f"{precision} {accumulate} {seed}")
    faults = []
    for number in range(count):
        where = generator.choice(_PLACES)
        step = _WARM_UP + _EVERY * number
        batch = accumulate * step + generator.randrange(accumulate)
        lasting = where == "batch" or generator.random() < lasting_part
        # BatchNorm takes an outlier of finite size out of the data again: nothing would be there to be found.
        kinds = _KINDS[:2] if where == "batch" else _KINDS
        slot = generator.randrange(num_ranks) if num_ranks > 1 else None
        faults.append(Corruption(kind=generator.choice(kinds), where=where, batch_idx=batch, lasting=lasting, slot=slot))
    return faults


def tally(result: dict[str, Any], faults: list[Corruption], accumulate: int, rows: list[dict[str, Any]], name: str) -> None:
    """Count what became of the faults of one training."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["step"] - 1, []).append(row)
    for fault in faults:
        told = found.pop(fault.batch_idx // accumulate, [])
        right = bool(told) and all(is_right(fault, row) for row in told)
        result["injected"] += 1
        result["detected"] += bool(told)
        result["attributed"] += right
        if not right:
            verdicts = sorted({f"{row['name']}: {row['verdict']} of slot {row['of_slot']}" for row in told})
            result["missed"].append(f"{name} x{accumulate} {fault}: {verdicts}")
    result["unexpected"] += len(found)


def is_right(fault: Corruption, row: dict[str, Any]) -> bool:
    """Whether a row says of a fault what it was, and, if it was one of a rank, of which."""
    if fault.slot is None:  # on one device nobody tells a device from data
        return bool((row["verdict"] == RerunDiagnostic.TRANSIENT_ERROR.value) != fault.lasting)
    if not fault.lasting:
        expected = RerunDiagnostic.TRANSIENT_ERROR
    elif fault.where == "batch":
        expected = RerunDiagnostic.CORRECT_RESULT
    else:
        expected = RerunDiagnostic.PERSISTENT_ERROR
    is_of_one = row["name"].startswith("gradient norm")  # of an average: nobody's, or where it came from
    return row["verdict"] == expected.value and (is_of_one or row["of_slot"] == fault.slot)


def inject(count: int, seed: int, lasting_part: float) -> dict[str, Any]:
    """Inject ``count`` faults on one device, and count what became of them."""
    result: dict[str, Any] = new_result()
    for precision, accumulate, share in settings(count):
        faults = plan(precision, accumulate, share, seed, lasting_part=lasting_part)
        rows, _ = fit(precision, accumulate, num_steps(share), faults)
        tally(result, faults, accumulate, rows, precision)
        transient_only, steps = only_transient(faults, accumulate)
        with_faults, without = (fit(precision, accumulate, steps, chosen)[1] for chosen in (transient_only, []))
        same = all(map(torch.equal, with_faults.state_dict().values(), without.state_dict().values()))
        result["kept" if same else "not_kept"] += 1
    return {**result, "missed": result["missed"][:20]}


def new_result() -> dict[str, Any]:
    return {"injected": 0, "detected": 0, "attributed": 0, "unexpected": 0, "kept": 0, "not_kept": 0, "missed": []}


def settings(count: int) -> list[tuple[str, int, int]]:
    """Return precision, batches a step, and how many of ``count`` faults are injected there."""
    pairs = [(precision, accumulate) for precision in _PRECISIONS for accumulate in (1, 3)]
    return [(*pair, count // len(pairs) + (number < count % len(pairs))) for number, pair in enumerate(pairs)]


def num_steps(num_faults: int) -> int:
    """Return how many steps a training with so many faults takes."""
    return _WARM_UP + _EVERY * num_faults


def only_transient(faults: list[Corruption], accumulate: int) -> tuple[list[Corruption], int]:
    """Return the first faults that happen once, and steps enough for them."""
    chosen = [fault for fault in faults if not fault.lasting][:20]
    return chosen, max((fault.batch_idx // accumulate for fault in chosen), default=0) + 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1, help="Under FTStrategy.")
    parser.add_argument("--shard-size", type=int, default=1, help="Ranks that share a copy of the model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lasting", type=float, default=0.5, help="Part of faults of devices that last; of several ranks each restarts one."
    )
    parser.add_argument("--alarm-seeds", type=int, default=0, help="Clean runs of each training, for false alarms.")
    parser.add_argument("--overhead-blocks", type=int, default=0, help="Four validated steps each.")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_ft"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if options.faults and options.ranks > 1:
        from benchmarks import rerun_ranks

        result |= rerun_ranks.inject(options.faults, options.seed, options.ranks, options.shard_size, options.lasting)
    elif options.faults:
        result |= inject(options.faults, options.seed, options.lasting)
    if options.alarm_seeds:
        from benchmarks import false_alarms

        result["false_alarms"] = false_alarms.measure(options.alarm_seeds, 2000)
    if options.overhead_blocks:
        from benchmarks import rerun_overhead

        result |= rerun_overhead.measure("10M", options.overhead_blocks, options.shard_size)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
