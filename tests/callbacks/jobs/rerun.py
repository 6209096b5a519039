"""Fits with faults that `RerunValidation` is to find out about: ``rerun.py STRATEGY SCENARIO...``."""

import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation

STRATEGIES: dict[str, Any] = {
    "FTStrategy": FTStrategy,
    "sharded": lambda: FTStrategy(2),
    "ddp": lambda: "ddp",
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
SLOT = int(os.environ.get("LIGHTNING_FT_SLOT", os.environ.get("LOCAL_RANK", 0)))
INCARNATION = int(os.environ.get("LIGHTNING_FT_INCARNATION", 0))
# scenario -> batch index -> slot -> what happens; once, or each time that the batch is run
SCENARIOS: dict[str, dict[int, tuple[int, str, bool]]] = {
    "no fault": {},
    "transient": {2: (1, "nan", True), 13: (0, "inf", True), 19: (1, "gradient", True), 25: (1, "spike", True)},
    "poisoned": {7: (1, "nan", False), 17: (0, "inf", False)},
    "none": {5: (1, "none", False), 8: (0, "nan", True)},
    "killed": {4: (1, "nan", True), 5: (2, "killed again", False)},
    "undecided": {4: (1, "nan", False)},
}


class Model(LightningModule):
    def __init__(self, scenario: str, sharded: bool) -> None:
        super().__init__()
        norm = nn.Identity() if sharded else nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4), nn.Linear(4, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.scenario = SCENARIOS[scenario]
        self.in_step = scenario != "none"  # or one rank would wait for the other to log
        self.done: list[int] = []
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        inputs, targets = batch
        outputs = self.net(inputs)
        loss = nn.functional.smooth_l1_loss(outputs, targets)
        self.error(outputs, targets)
        self.calls.append(batch_idx)
        loss = self.fault(batch_idx, loss)
        self.log("error", self.error, on_step=False, on_epoch=True)
        if loss is not None:
            self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=self.in_step)
        return loss

    def fault(self, batch_idx: int, loss: Tensor) -> Tensor | None:
        slot, kind, once = self.scenario.get(batch_idx, (-1, "", False))
        if slot != SLOT or (once and batch_idx in self.done):
            return loss
        self.done.append(batch_idx)
        if kind == "killed again":
            if self.done.count(batch_idx) == 2 and INCARNATION == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss
        if kind == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
            return loss
        return {"nan": loss * math.nan, "inf": loss * math.inf, "spike": loss * 1e8, "none": None}[kind]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Model):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def main() -> None:
    strategy, *scenarios = sys.argv[1:]
    result: dict[str, Any] = {}
    for scenario in scenarios:
        seed_everything(5, verbose=False)
        accumulate = 1 if scenario == "none" else 3
        validation = RerunValidation(without_opinion="checkpoint" if scenario == "undecided" else "assume_correct")
        validation.second_opinion = lambda findings: None  # faults here are of a rank, not of its batch
        devices = 3 if scenario == "killed" else 2
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=STRATEGIES[strategy](),
            max_epochs=1,
            accumulate_grad_batches=2 if scenario == "killed" else accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[validation],
        )
        sharded = strategy in ("sharded", "fsdp2")
        model = (Sharded if strategy == "fsdp2" else Model)(scenario, sharded)
        inputs = torch.randn(4 * 27 * devices, 8)
        data = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=4)
        trainer.fit(model, data)
        state = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()
        }
        weights = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state.items()}
        result[scenario] = {
            "finite": all(bool(value.isfinite().all()) for value in state.values()),
            "weights": weights,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "rows": list(validation.rows),
            "steps": trainer.global_step,
            "calls": len(model.calls),
        }
    Path(f"result_{SLOT}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
