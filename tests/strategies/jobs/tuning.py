"""Search a learning rate by the tuner and by a callback, then train and validate; a rank dies in either search."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.lr = 0.01
        self.dies_in = ""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.dies_in and batch_idx == 3 and self.trainer.global_rank == 1 and not Path(self.dies_in).exists():
            Path(self.dies_in).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def main() -> None:
    seed_everything(1)
    data = TensorDataset(torch.randn(288, 4))
    train, val = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "devices": 3}
    search: dict[str, Any] = {"early_stop_threshold": None}
    model = Model()
    model.dies_in = "tuner"
    trainer = Trainer(strategy=FTStrategy(min_replicas=3), max_epochs=1, enable_checkpointing=False, **quiet)
    found = [Tuner(trainer).lr_find(model, train, num_training=20, **search).suggestion()]  # type: ignore[union-attr]
    found.append(model.lr)
    model.dies_in = "callback"
    finder = LearningRateFinder(num_training_steps=20, **search)
    trainer = Trainer(strategy=FTStrategy(min_replicas=3), max_epochs=2, callbacks=[finder], **quiet)
    trainer.fit(model, train)
    found += [model.lr, trainer.optimizers[0].param_groups[0]["lr"], finder.optimal_lr.suggestion()]  # type: ignore[union-attr]
    weights = model.net.weight.tolist()
    loss = trainer.validate(model, val, verbose=False)[0]["loss"]
    Path(f"rank_{trainer.global_rank}.json").write_text(json.dumps([found, weights, loss]))


if __name__ == "__main__":
    main()
