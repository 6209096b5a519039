"""A fit with a poisoned batch, a rank whose gradients are wrong each time, and one whose losses are, one after the other."""

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.testing import fingerprint

warnings.filterwarnings("ignore")


def place(trainer: Trainer) -> tuple[int, int]:
    environment = RankEnvironment.of_process()
    return (trainer.global_rank, 0) if environment is None else (environment.slot, environment.incarnation)


class Model(LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Dropout(0.2), nn.Linear(30, 1))
        self.options = options
        self.net[4].register_forward_hook(self.watch)  # a sharded parameter would have no hook of its own

    def is_broken(self, what: str) -> bool:
        slot, step = self.options.get(what, (-1, 0))
        return place(self.trainer) == (slot, 0) and self.trainer.global_step >= step

    def watch(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.is_broken("gradient") else gradient

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_broken("memory"):
            self.options["memory"] = (-1, 0)
            next(self.parameters()).mul_(1e8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.smooth_l1_loss(self.net(batch[0]), batch[1])
        if self.is_broken("loss"):
            loss = loss * math.nan
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    options = json.loads(sys.argv[1])
    seed_everything(3, verbose=False)
    validation = RerunValidation(validate_parameters="memory" in options)
    strategies: dict[str, Any] = {
        "ddp": lambda: "ddp",
        "FTStrategy": lambda: FTStrategy(min_replicas=2),
        "sharded": lambda: FTStrategy(2, min_replicas=2),
    }
    devices = 4 if options["strategy"] == "sharded" else 3
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategies[options["strategy"]](),
        max_epochs=1,
        callbacks=[validation],
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    inputs = torch.randn(4 * devices * 24, 7)
    targets = inputs.mean(1, keepdim=True)
    inputs[4 * 3 * 3 + 5, 2] = math.nan  # in step 2
    model = Model(options)
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=4))
    buffers = dict(model.named_buffers())  # until the next step these are each rank's own
    result = {
        "rows": list(validation.rows),
        "fingerprint": {k: v for k, v in fingerprint(trainer).items() if k.removeprefix("module.") not in buffers},
        "finite": all(bool(value.isfinite().all()) for value in model.state_dict().values()),
        "loss": float(trainer.callback_metrics["loss"]),
    }
    Path(f"result_{place(trainer)[0]}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
