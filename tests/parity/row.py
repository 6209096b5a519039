"""What a row of the parity table consists of; every part has a default that trains."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ft.testing import Fault

POINTS = (
    "train_batch_start",
    "forward",
    "backward_early",
    "gradients_ready",
    "before_optimizer_step",
    "train_batch_end",
    "validation_batch",
    "train_epoch_end",
)

CLIPPED = dict.fromkeys(
    ("steps", "weights", "callback_metrics", "logged_metrics", "files"),
    "the norm by which gradients are clipped is summed in another order",
)
"""Parts that differ in their last bits."""


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Inputs, targets and each sample's number."""

    def __init__(self, count: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 8, generator=generator)
        self.targets = torch.randn(count, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def train_loader(num_samples: int = 24, batch_size: int = 2, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    """By default a length that two ranks and three divide evenly."""
    return DataLoader(Samples(num_samples, seed=1), batch_size=batch_size, shuffle=shuffle, **options)


def val_loader(num_samples: int = 12, batch_size: int = 2, seed: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(num_samples, seed=seed), batch_size=batch_size, **options)


class Net(LightningModule):
    """Logs a mean over ranks in every stage."""

    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Run:
    """A row that runs: what its calls work with.

    Args:
        row: The row.
        make_trainer: Returns a new Trainer with the row's options and others.

    """

    def __init__(self, row: "Row", make_trainer: Callable[..., Trainer]) -> None:
        self.make_trainer = make_trainer
        self.module = row.module()
        self.train = row.train()
        self.val = row.val()
        self.trainer = make_trainer()

    def fit(self, **options: Any) -> None:
        self.trainer.fit(self.module, self.train, self.val, **options)


def fit(run: Run) -> Any:
    return run.fit()


@dataclass(frozen=True)
class Row:
    """A training that must be the same under ``ddp`` and under FTStrategy.

    Args:
        name: A name that no other row has.
        module: Makes the LightningModule.
        trainer: Options of the Trainer, or what makes them.
        callbacks: Makes the callbacks.
        train: Makes the training data.
        val: Makes the validation data.
        calls: What is called; what it returns is compared.
        ddp: The strategy to compare with.
        ft: Arguments of FTStrategy.
        kill: What dies in the third run; ``None``: chosen by the name. ``False``: there is no third run.
        kill_devices: Ranks of the third run.
        joins: Whether the others wait for the dead rank's return.
        audited: Whether the events of the third run are those of one training from its begin to its end.
        cut: Whether training ends in the middle of an epoch.
        alike: Further parts of the record in which all ranks of the third run must agree.
        unbalanced: Hooks ("train_batch") of which an end may be missing, as under ``ddp``.
        differs: Parts of the record that may differ from ``ddp``, and why.
        sharded: Of the same for a module that is sharded; a text: what the error says by which it is refused.

    """

    name: str
    module: Callable[[], LightningModule] = Net
    trainer: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Callback]] = tuple
    train: Callable[[], Any] = train_loader
    val: Callable[[], Any] = val_loader
    calls: Callable[[Run], Any] = fit
    ddp: str = "ddp"
    ft: Mapping[str, Any] = field(default_factory=dict)
    kill: Mapping[str, Any] | bool | None = None
    kill_devices: int = 3
    joins: bool = True
    audited: bool = True
    cut: bool = False
    alike: Sequence[str] = ()
    unbalanced: Sequence[str] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    sharded: Mapping[str, str] | str = field(default_factory=dict)

    def trainer_options(self) -> dict[str, Any]:
        return dict(self.trainer() if callable(self.trainer) else self.trainer)

    @property
    def fault(self) -> Fault:
        number = zlib.crc32(self.name.encode())
        chosen = {
            "point": POINTS[number % len(POINTS)],
            "slot": number // 8 % self.kill_devices,
            "step": 1 + number // 24 % 5,
        }
        return Fault(kind="kill", **{**chosen, **(self.kill if isinstance(self.kill, Mapping) else {})})
