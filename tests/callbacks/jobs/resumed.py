"""A fit that writes down everything it does, and the same fit resumed from its checkpoints; also a job of several ranks."""

import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import LoaderPosition
from lightning_ft.testing import end_process


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int, noisy: bool = False) -> None:
        self.count = count
        self.noisy = noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if self.noisy:
            return torch.tensor([float(index), torch.rand(()).item() + random.random() + np.random.rand()])
        return torch.tensor([float(index), 0.5])


class Model(LightningModule):
    def __init__(self, plateau: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.validation_error = torchmetrics.MeanSquaredError()
        self.plateau = plateau
        self.trace: list[Any] = []

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch / 10).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict | list | tuple):
            parts = batch.values() if isinstance(batch, dict) else batch
            seen = [None if part is None else part.flatten().tolist() for part in parts]
            batch = torch.cat([part for part in parts if part is not None])
        else:
            seen = batch.flatten().tolist()
        output = self(batch)
        loss = (output - batch[:, 1]).pow(2).mean()
        self.error(output, batch[:, 1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        (group,) = self.optimizers().param_groups
        self.trace.append((self.current_epoch, batch_idx, self.global_step, seen, loss.item(), group["lr"]))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        output = self(batch)
        self.validation_error(output, batch[:, 1])
        self.log("val_error", self.validation_error)
        self.log("val_loss", (output - batch[:, 1]).pow(2).mean() + torch.rand(()))
        self.trace.append(("validation", batch_idx, self.global_step))

    def on_train_epoch_start(self) -> None:
        self.trace.append(("epoch", self.current_epoch, torch.rand(()).item()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return [optimizer], [{"scheduler": scheduler, "monitor": "loss", "interval": self.plateau}]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


class ShardedByHand(Model):
    """Shards itself, as Lightning's own strategy for FSDP2 wants it."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index,unused-ignore]


class Data(LightningDataModule):
    """Keeps what is this rank's alone, and gets that back."""

    def __init__(self, make_loader: Callable[[], Any], validation: Any, rank: int) -> None:
        super().__init__()
        self.train_dataloader = make_loader  # type: ignore[method-assign]
        self.val_dataloader = lambda: validation  # type: ignore[method-assign]
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"rank": self.rank}


class Rows(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
)


class Snapshots(Callback):
    """Saves a checkpoint in a hook whenever it is asked to, and notes how much of everything there was then."""

    def __init__(self, directory: Path, model: Model, rows: Rows, hooks: tuple[str, ...]) -> None:
        self.directory = directory
        self.taken: dict[str, tuple[int, int]] = {}
        for hook in hooks:
            setattr(self, hook, lambda *args, hook=hook: self._save(hook, *args))
        self.model, self.rows = model, rows

    def _save(self, hook: str, trainer: Trainer, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        name = f"{len(self.taken):03d}-{hook}-{trainer.current_epoch}-{trainer.fit_loop.batch_idx}.ckpt"
        if hook != "on_validation_batch_end":  # a validation begins again
            self.now = len(self.model.trace), len(self.rows.rows)
        self.taken[name] = self.now
        trainer.save_checkpoint(self.directory / name)


@dataclass
class Fit:
    """What a fit did."""

    trace: list[Any]
    rows: list[Any]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    step: int
    epoch: int
    random: Any
    taken: dict[str, tuple[int, int]] = field(default_factory=dict)

    def assert_continued_by(self, other: "Fit", name: str) -> None:
        num_trace, num_rows = self.taken[name]
        expected = self.trace[num_trace:]
        assert other.trace == expected, (
            name,
            next((p for p in zip(other.trace, expected, strict=False) if p[0] != p[1]), 0),
        )
        if name == [*self.taken][-1]:  # nothing was left to do
            return
        # A row of the step in which the checkpoint was taken may have been logged after it.
        missing = len(self.rows) - num_rows - len(other.rows)
        assert 0 <= missing <= 1, (name, missing)
        assert str(other.rows) == str(self.rows[num_rows + missing :]), name
        assert (other.step, other.epoch) == (self.step, self.epoch), name
        assert other.metrics.keys() == self.metrics.keys(), name
        assert all(other.metrics[key] == value for key, value in self.metrics.items()), name
        assert all(torch.equal(other.weights[key], value) for key, value in self.weights.items()), name
        assert str(other.random) == str(self.random), name


def fit(
    directory: Path,
    make_loader: Callable[[], Any],
    *,
    hooks: tuple[str, ...] = (),
    ckpt: str | None = None,
    num_validation: int = 4,
    plateau: str = "",
    callbacks: tuple[Callback, ...] = (),
    position: Any = "error",
    seed: int = 3,
    model_type: type[Model] = Model,
    shard_size: int = 1,
    rank: int | None = None,
    **options: Any,
) -> Fit:
    seed_everything(3, verbose=False)
    model, rows = model_type(plateau), Rows()
    # Nothing of a resumed fit may depend on what a new process draws first.
    seed_everything(seed if ckpt is None else 99, verbose=False)
    if shard_size > 1:
        options["strategy"] = FTStrategy(shard_size=shard_size)
    if options.get("strategy") == "fsdp2":
        options["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    snapshots = Snapshots(directory, model, rows, hooks)
    trainer = Trainer(
        accelerator="cpu",
        logger=rows,
        callbacks=[*([LoaderPosition(position)] if position else []), snapshots, *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if num_validation else 0,
        **{"devices": 1, "max_epochs": 2, **options},
    )
    validation = DataLoader(Numbers(num_validation or 2), batch_size=2)
    path = None if ckpt is None else directory / ckpt
    if rank is None:
        trainer.fit(model, make_loader(), validation, ckpt_path=path, weights_only=False)
    else:
        trainer.fit(model, datamodule=Data(make_loader, validation, rank), ckpt_path=path, weights_only=False)
    return Fit(
        model.trace,
        rows.rows,
        {name: _own(value).detach().clone() for name, value in model.state_dict().items()},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.global_step,
        trainer.current_epoch,
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        snapshots.taken,
    )


def _own(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_resumable(
    directory: Path,
    make_loader: Callable[[], Any],
    *,
    hooks: tuple[str, ...] = HOOKS[1:],
    every: int = 3,
    first: int = 0,
    **options: Any,
) -> None:
    """Resume from every so many of the checkpoints that a fit takes in ``hooks``, and compare with that fit."""
    whole = fit(directory, make_loader, hooks=hooks, **options)
    chosen = list(whole.taken)[first::every]
    assert len(chosen) > 1
    for name in chosen:
        whole.assert_continued_by(fit(directory, make_loader, ckpt=name, **options), name)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = json.loads(sys.argv[1])
    rank = int(os.environ.get("RANK", os.environ.get("LIGHTNING_FT_SLOT", 0)))
    devices = options.pop("devices", None) or int(os.environ["WORLD_SIZE"])
    loading = {"batch_size": 3, "shuffle": True, **options.pop("loading", {})}
    if options.get("strategy") == "fsdp2":
        options["model_type"] = ShardedByHand
    data = Numbers(options.pop("num_samples"), noisy="num_workers" not in loading)
    assert_resumable(Path("."), lambda: DataLoader(data, **loading), seed=3 + rank, rank=rank, devices=devices, **options)
    Path(f"done_{rank}").touch()


if __name__ == "__main__":
    main()
    end_process()
