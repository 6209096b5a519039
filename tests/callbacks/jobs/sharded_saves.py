"""Fits of a sharded module that are saved, resumed from what was saved, killed while saving, or asked to stop."""

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import AsyncCheckpoint
from lightning_ft.checkpoint.writer import Writer

warnings.filterwarnings("ignore")
NUM_STEPS = 6


class Model(LightningModule):
    """Its last layer has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 130), nn.BatchNorm1d(130), nn.Tanh(), nn.Linear(130, 5), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Faults(Callback):
    """Has slot 3 killed when it is to write its second part, in step 4, or asks slot 1 to stop in a validation."""

    def __init__(self, *, kill: bool = False, stop: bool = False, again: bool = False) -> None:
        self.kill, self.stop, self.again = kill, stop, again

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.again:
            trainer.save_checkpoint("again.ckpt/")
        engine: Any = trainer.strategy.engine
        if self.kill and (engine.slot, engine.incarnation) == (3, 0):
            write, calls = Writer.write, []

            def write_or_die(*args: Any) -> Any:
                calls.append(1)
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*args)

            Writer.write = write_or_die  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine: Any = trainer.strategy.engine
        if self.kill and (engine.slot, engine.incarnation, trainer.global_step) == (3, 0, 4):
            threading.Event().wait()  # until it is killed: the others notice in step 5, be the writing ever so slow

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        engine: Any = trainer.strategy.engine
        if not self.stop or batch_idx == 0:  # in which all are sent the buffers
            return
        Path(f"validates_{engine.slot}").touch()
        if engine.slot == 1:
            while not all(Path(f"validates_{slot}").exists() for slot in (0, 2)):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)  # the others learn of it when they wait for this rank already


def fit(name: str, options: dict[str, Any], ckpt_path: str | None = None, every: int = 2, **faults: bool) -> Trainer:
    seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(480, 7))  # as many batches for four ranks as for three
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        strategy=FTStrategy(options["shard_size"]),
        max_steps=NUM_STEPS,
        val_check_interval=4,
        num_sanity_val_steps=0,
        callbacks=[AsyncCheckpoint(name, "{step}", every_n_train_steps=every, save_top_k=-1), Faults(**faults)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = [DataLoader(data, batch_size=4)] * (1 + faults.get("stop", False))
    trainer.fit(Model(), *loaders, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def main() -> None:
    options = json.loads(sys.argv[1])
    if source := options.get("resume"):
        fit("resumed", options, source, every=1, again=True, stop=True)
        return
    trainer = fit("first", options)
    trainer.save_checkpoint("after.ckpt")
    trainer.save_checkpoint("after_as_directory.ckpt/")
    fit("resumed", options, str(Path("first", "step=2.ckpt")))
    fit("killed", options, kill=True)


if __name__ == "__main__":
    main()
