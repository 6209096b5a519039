"""Fits with corruption that nobody sees, found by running steps again: ``replayed.py STRATEGY SCENARIO...``."""

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import ReplayOptions, RerunValidation

STRATEGIES: dict[str, Any] = {
    "FTStrategy": FTStrategy,
    "sharded": lambda: FTStrategy(2),
    "ddp": lambda: "ddp",
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
SLOT = int(os.environ.get("LIGHTNING_FT_SLOT", os.environ.get("LOCAL_RANK", 0)))
INCARNATION = int(os.environ.get("LIGHTNING_FT_INCARNATION", 0))
BATCH = 10  # of step 4, with three batches each


class Model(LightningModule):
    def __init__(self, scenario: str, sharded: bool) -> None:
        super().__init__()
        norm = nn.Identity() if sharded else nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4), nn.Linear(4, 1))
        self.scenario = scenario
        self.calls: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.smooth_l1_loss(self.net(inputs), targets)
        self.calls[batch_idx] += 1
        if (SLOT, batch_idx) == (1, BATCH) and self.calls[batch_idx] == 1 and self.scenario == "gradient":
            loss.register_hook(lambda gradient: gradient * 1.01)
        if self.scenario == "killed" and (SLOT, batch_idx, INCARNATION) == (1, BATCH, 0) and self.calls[batch_idx] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.scenario == "parameter" and (SLOT, batch_idx) == (1, BATCH + 1):  # the last one of step 4
            bias = self.net[4].bias
            (bias.to_local() if hasattr(bias, "to_local") else bias)[0] += 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sharded(Model):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train(strategy: str, scenario: str, devices: int, replay: ReplayOptions | None) -> dict[str, Any]:
    seed_everything(5, verbose=False)
    validation = RerunValidation(replay=replay)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        accumulate_grad_batches=3,
        gradient_clip_val=None if strategy == "fsdp2" else 0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[validation],
    )
    sharded = strategy in ("sharded", "fsdp2")
    model = (Sharded if strategy == "fsdp2" else Model)(scenario, sharded)
    uneven = 4 if strategy == "FTStrategy" else 0  # then somebody has no batch in the last step
    inputs = torch.randn(4 * 19 * devices - uneven, 8)
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=4))
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()
    }
    return {
        "replays": list(validation.replays),
        "rejections": len(validation.rows),
        "weights": {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state.items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def main() -> None:
    strategy, devices, *scenarios = sys.argv[1:]
    result: dict[str, Any] = {}
    for scenario in scenarios:
        replay = None if scenario == "known" else ReplayOptions(3, "always")
        result[scenario] = train(strategy, scenario, int(devices), replay)
    Path(f"result_{SLOT}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
