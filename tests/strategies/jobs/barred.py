"""A short training with a progress bar; slot 1 is killed in it and stays away."""

import sys
import warnings

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_ft import FTStrategy
from lightning_ft.testing import FaultPlan

warnings.filterwarnings("ignore")

if __name__ == "__main__":
    bar = RichProgressBar(refresh_rate=1) if sys.argv[1] == "rich" else TQDMProgressBar(refresh_rate=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=FTStrategy(max_restarts=0),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[bar, FaultPlan.from_environ()],
    )
    trainer.fit(BoringModel(), DataLoader(torch.randn(60, 32), batch_size=2))
