"""A training of a second, to be started in every way in which a Python program can be started."""

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy

warnings.filterwarnings("ignore")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(devices: int = 2, **loader: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FTStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.rand(16, 4)), batch_size=2, **loader))
    # One write, so that the line stays whole among those of others.
    ended = {"rank": trainer.global_rank, "world_size": trainer.world_size, "argv": sys.argv, "cwd": os.getcwd()}
    print("ended " + json.dumps(ended), flush=True)


def train_in_child() -> None:
    """Train on one device, in a process that this one starts."""
    program = [sys.executable, "-c", "import anywhere; anywhere.train(1)"]
    child = subprocess.run(program, capture_output=True, text=True, timeout=120)
    print(f"child {child.stdout}{child.stderr if child.returncode else ''}")


if __name__ == "__main__":
    train()
