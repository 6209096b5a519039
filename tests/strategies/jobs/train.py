"""The training that the tests run: options as JSON in the first argument, results as JSON files in the directory."""

import hashlib
import json
import os
import random
import signal
import sys
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy
from lightning_ft.testing import FaultPlan, end_process, fingerprint

warnings.filterwarnings("ignore")


@dataclass
class Options:
    strategy: str = "ft"
    devices: int = 3
    ft: dict[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ("fit",)
    killed_after_calls: int | None = None
    num_samples: int = 96
    num_validation_samples: int = 24
    batch_size: int = 4
    max_epochs: int = 2
    max_steps: int = -1
    accumulate: int = 1
    clip: float | None = None
    precision: str = "32-true"
    model: str = "Model"
    callbacks: tuple[str, ...] = ()
    batch_norm: bool = False
    dropout: float = 0.0
    workers: int = 0
    loggers: tuple[str, ...] = ("csv",)
    checkpoints: bool = True
    every_n_train_steps: int = 5
    val_check_interval: float | int = 1.0
    ckpt_path: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 16, generator=generator)
        self.targets = torch.randn(count, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class Model(LightningModule):
    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        norm = nn.BatchNorm1d(32) if batch_norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))
        self.train_error = torchmetrics.MeanSquaredError()
        self.validation_error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        outputs = self.net(inputs).float()
        loss = nn.functional.mse_loss(outputs, targets)
        self.train_error(outputs, targets)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        outputs = self.net(inputs).float()
        self.validation_error(outputs, targets)
        self.log("val_error", self.validation_error)
        self.log("val_loss", nn.functional.mse_loss(outputs, targets), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        self.log("test_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class TrainedSamples(Callback):
    """Writes down which samples a ticket consists of, before it is trained."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loader = trainer.train_dataloader
        if getattr(loader, "ticket", None) is not None:
            line = json.dumps({"epoch": loader.plan.epoch, "ticket": loader.ticket, "samples": batch[2].tolist()})
            with open(f"samples_{os.getpid()}.jsonl", "a") as file:
                file.write(line + "\n")


def find(path: str) -> Any:
    """A class of ``models.py``, or of the module that comes before its name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module or "models"), name)


def make_trainer(options: Options) -> Trainer:
    callbacks: list[Callback] = [FaultPlan.from_environ(), TrainedSamples(), LearningRateMonitor("step")]
    if options.checkpoints:
        callbacks.append(EarlyStopping("val_loss", patience=10))
        callbacks.append(ModelCheckpoint("best", monitor="val_loss", save_top_k=2, save_last=True))
        every = options.every_n_train_steps
        callbacks.append(ModelCheckpoint("steps", filename="{step}", every_n_train_steps=every, save_top_k=-1))
    callbacks.extend(find(name)() for name in options.callbacks)
    makers = {"csv": lambda: CSVLogger(".", name="csv"), "tensorboard": lambda: TensorBoardLogger(".", name="board")}
    return Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=FTStrategy(**options.ft) if options.strategy == "FTStrategy" else options.strategy,
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        precision=options.precision if options.precision != "16-mixed" else None,
        plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))] if options.precision == "16-mixed" else [],
        val_check_interval=options.val_check_interval,
        logger=[makers[name]() for name in options.loggers],
        callbacks=callbacks,
        enable_checkpointing=options.checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        **options.trainer,
    )


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def main() -> None:
    options = Options(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else Options()
    seed_everything(7, verbose=False)
    trainer = make_trainer(options)
    make_model = Model if options.model == "Model" else find(options.model)
    model = make_model(options.batch_norm, options.dropout)
    training = DataLoader(
        Samples(options.num_samples, seed=1),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
    )
    validation = DataLoader(Samples(options.num_validation_samples, seed=2), batch_size=options.batch_size)
    result: dict[str, Any] = {}
    for call in options.calls:
        if call == "fit":
            trainer.fit(model, training, validation, ckpt_path=options.ckpt_path)
            result["callback_metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
            result["fingerprint"] = fingerprint(trainer)
            result["random"] = {
                "torch": digest(torch.get_rng_state().tolist()),
                "numpy": digest(np.random.get_state()[1].tolist()),
                "python": digest(random.getstate()),
            }
        elif call == "predict":
            predicted = trainer.predict(model, validation) or []
            result["predict"] = [int(index) for batch in predicted for index in batch]
        else:
            result[call] = getattr(trainer, call)(model, validation, verbose=False)
    result |= {
        "rank": trainer.global_rank,
        "incarnation": int(os.environ.get("LIGHTNING_FT_INCARNATION", 0)),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "versions": [logger.version for logger in trainer.loggers],
        "best_model_path": trainer.checkpoint_callback.best_model_path if options.checkpoints else "",
    }
    slot = os.environ.get("LIGHTNING_FT_SLOT", trainer.global_rank)
    if options.killed_after_calls == int(slot):
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"result_{slot}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    end_process()
