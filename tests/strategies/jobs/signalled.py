"""A training in which one rank sends a signal to the supervisor, or to itself, at its fifth step."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy, SupervisionOptions

warnings.filterwarnings("ignore")


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sender(Callback):
    def __init__(self, name, to):
        self.signal, self.to = getattr(signal, name), to

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill({"supervisor": os.getppid(), "rank": os.getpid()}[self.to], self.signal)

    def on_exception(self, trainer, pl_module, exception):
        Path(f"exception_{os.environ['LIGHTNING_FT_SLOT']}").write_text(f"{type(exception).__name__} {trainer.global_step}")

    def teardown(self, trainer, pl_module, stage):
        Path(f"teardown_{os.environ['LIGHTNING_FT_SLOT']}").touch()


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=FTStrategy(supervision=SupervisionOptions(grace=20)),
        max_steps=100_000,
        logger=CSVLogger("."),
        log_every_n_steps=1,
        callbacks=[Sender(*sys.argv[1:3])],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(3000, 4)), batch_size=4))
