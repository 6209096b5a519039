"""A training on one device that resumes by itself, saves every step, and is killed after the step of the first argument."""

import os
import signal
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 512)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Killed(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    seed_everything(3, verbose=False)
    checkpoint = AsyncCheckpoint("saved", "{step}", every_n_train_steps=1, resume="auto")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=24,
        callbacks=[checkpoint, Killed()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=1))
    assert trainer.global_step == 24


if __name__ == "__main__":
    main()
