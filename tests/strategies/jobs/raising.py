"""A training in which any code of the user's can fail: options as JSON in the first argument.

Each process of a slot fails once, in the place that the list of its slot names for its incarnation, once a step is done or
while it joins. When all lists are used up, the training ends after the epoch under way. What is seen of the end is
written into ``seen_*.jsonl``.
"""

import atexit
import builtins
import ctypes
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ft import FTStrategy

warnings.filterwarnings("ignore")
SLOT = int(os.environ["LIGHTNING_FT_SLOT"])
INCARNATION = int(os.environ["LIGHTNING_FT_INCARNATION"])


@dataclass
class Options:
    devices: int = 3
    places: dict[str, list[str]] = field(default_factory=dict)
    """By slot, what fails in its first, second, ... process: "training_step", "Callback.setup", "segfault@forward"."""
    at_step: int = 1
    index: int | None = None
    """A sample that can't be read."""
    ft: dict[str, Any] = field(default_factory=dict)
    max_epochs: int = 200
    max_steps: int = -1
    workers: int = 0
    checkpoints: bool = False
    sampler: bool = False
    """Whether the user's own sampler draws the order."""
    calls: tuple[str, ...] = ("fit",)


OPTIONS = Options(**json.loads(sys.argv[1]))


class Refused(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = lambda: None


def see(what: str, **more: Any) -> None:
    with open(f"seen_{SLOT}.jsonl", "a") as file:
        file.write(
            json.dumps({"seen": what, "incarnation": INCARNATION, "pid": os.getpid(), "t": time.time(), **more}) + "\n"
        )


class Fault:
    """What this process is to fail of."""

    def __init__(self) -> None:
        places = OPTIONS.places.get(str(SLOT), [])
        how, _, self.place = (places[INCARNATION] if len(places) > INCARNATION else "").rpartition("@")
        self.how = how or "raise"
        self.trainer: Trainer | None = None
        self.first_step: int | None = None
        self.gives_object = False

    @property
    def is_last(self) -> bool:
        return len(OPTIONS.places.get(str(SLOT), [])) <= INCARNATION + (self.place == "")

    def reach(self, place: str) -> None:
        if place != self.place:
            return
        if self.trainer is None or self.first_step is None:
            if INCARNATION == 0 and OPTIONS.at_step:
                return
        elif self.trainer.global_step < max(OPTIONS.at_step, self.first_step + 1):
            return  # a process that did nothing would be started again later each time
        self.place = ""
        see("fault", place=place, how=self.how)
        self.gives_object = self.how == "object"
        if self.gives_object:
            return
        end(self.how)
        fail(self.how, f"in {place} of slot {SLOT}")


def fail(how: str, text: str) -> None:
    error: BaseException = Refused(text)
    match how:
        case "long":
            error = Refused(f"{text}, {'x' * 2_000_000}")
        case "unprintable":
            error = Unprintable(text)
        case "unpicklable":
            error = Unpicklable(text)
        case "chained":
            error.__cause__ = ValueError("the cause")
        case "interrupt":
            error = KeyboardInterrupt()
        case "group":
            error = builtins.ExceptionGroup(text, [Refused("one"), ValueError("two")])
    raise error


def end(how: str) -> None:
    """End this process in another way than by an exception of the user's."""
    match how:
        case "exit 0" | "exit 3":
            sys.exit(int(how[-1]))
        case "exit text":
            sys.exit("words of farewell")
        case "_exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            bytearray(1 << 60)


FAULT = Fault()
CALLBACK_HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "state_dict")]
MODULE_HOOKS = [
    *(name for name in dir(LightningModule) if name.startswith(("on_", "configure_")) and not name.endswith("export")),
    *("setup", "training_step", "validation_step", "forward", "backward", "optimizer_step", "optimizer_zero_grad"),
    *("test_step", "predict_step"),
    *("lr_scheduler_step", "transfer_batch_to_device", "state_dict", "prepare_data", "configure_gradient_clipping"),
]
DATA_HOOKS = [
    *(f"{name}_dataloader" for name in ("train", "val", "test", "predict")),
    *("setup", "on_before_batch_transfer", "state_dict", "prepare_data"),
]
LOGGER_METHODS = ["log_metrics", "save", "log_hyperparams", "after_save_checkpoint"]
NOT_PLACES = {"on_gpu", "on_exception", "configure_sharded_model"}


def fail_in(*names: str, prefix: str = "") -> Any:
    """Have each of the methods reach the place of its name first."""

    def decorate(kind: type) -> type:
        for name in sorted(set(names) - NOT_PLACES):
            original = getattr(kind, name)
            if isinstance(original, property):
                continue

            def method(self: Any, *args: Any, _place: str = prefix + name, _original: Any = original, **more: Any) -> Any:
                FAULT.reach(_place)
                return _original(self, *args, **more)

            setattr(kind, name, method)  # not `functools.wraps`: Lightning would see that it is not overridden
        return kind

    return decorate


@fail_in("__getitem__", prefix="Dataset.")
class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        if index == OPTIONS.index:
            raise Refused(f"sample {index} is broken")
        return torch.full((4,), float(index))


@fail_in("__iter__", prefix="Sampler.")
class Order(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())

    def __len__(self) -> int:
        return len(Samples())


@fail_in("update", "compute", "reset", prefix="Metric.")
class Mean(torchmetrics.MeanMetric):
    pass


@fail_in("step", "state_dict", prefix="Optimizer.")
class Optimizer(torch.optim.AdamW):
    pass


@fail_in("state_dict", prefix="Scheduler.")
class Scheduler(torch.optim.lr_scheduler.StepLR):
    pass


@fail_in(*MODULE_HOOKS)
class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.mean = Mean()

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean(self(batch))
        self.log("val", self.mean)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = Optimizer(self.parameters(), lr=1e-3)
        return [optimizer], [Scheduler(optimizer, 1)]

    def on_exception(self, exception: BaseException) -> None:
        see("LightningModule.on_exception")


def collate(batch: list[Tensor]) -> Tensor:
    FAULT.reach("collate")
    return torch.stack(batch)


def init_worker(worker: int) -> None:
    see("worker")
    FAULT.reach("worker_init")


@fail_in(*DATA_HOOKS, prefix="DataModule.")
class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        workers = {"num_workers": OPTIONS.workers, "worker_init_fn": init_worker} if OPTIONS.workers else {}
        samples = Samples()
        order = {"sampler": Order()} if OPTIONS.sampler else {"shuffle": True}
        return DataLoader(samples, batch_size=2, collate_fn=collate, **order, **workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=2)

    def predict_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=2)

    def on_exception(self, exception: BaseException) -> None:
        see("DataModule.on_exception", exception=type(exception).__name__)


@fail_in(*LOGGER_METHODS, prefix="Logger.")
class Log(CSVLogger):
    @property
    def log_dir(self) -> str:
        FAULT.reach("Logger.log_dir")
        return super().log_dir

    def finalize(self, status: str) -> None:
        see("Logger.finalize", status=status)
        super().finalize(status)


@fail_in(*CALLBACK_HOOKS, prefix="Callback.")
class Watched(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        FAULT.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"some": object() if FAULT.gives_object else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        FAULT.reach("Callback.load_state_dict")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if FAULT.first_step is None:
            FAULT.first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        are_last = trainer.strategy.reduce_boolean_decision(FAULT.is_last)
        trainer.should_stop = are_last and trainer.world_size == OPTIONS.devices

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        see("Callback.on_exception", exception=type(exception).__name__, step=trainer.global_step)


def main() -> None:
    seed_everything(3, verbose=False)
    atexit.register(see, "atexit")
    callbacks: list[Callback] = [Watched()]
    if OPTIONS.checkpoints:
        callbacks.append(OnExceptionCheckpoint("checkpoints"))
        callbacks.append(ModelCheckpoint("kept", save_on_exception=True, save_last=True, every_n_train_steps=1000))
    trainer = Trainer(
        accelerator="cpu",
        devices=OPTIONS.devices,
        strategy=FTStrategy(**OPTIONS.ft),
        max_epochs=OPTIONS.max_epochs,
        max_steps=OPTIONS.max_steps,
        logger=Log(".", name="log"),
        callbacks=callbacks,
        enable_checkpointing=OPTIONS.checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0 if OPTIONS.at_step else 2,
    )
    model, data = Model(), Data()
    for call in OPTIONS.calls:
        getattr(trainer, call)(model, datamodule=data)
    see("end", step=trainer.global_step)
    Path(f"end_{SLOT}.json").write_text(json.dumps({"step": trainer.global_step, "incarnation": INCARNATION}))


if __name__ == "__main__":
    main()
