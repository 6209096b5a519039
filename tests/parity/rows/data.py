"""Loaders and samplers of map-style data."""

from collections.abc import Iterator
from typing import Any

import torch
from row import Net, Row, Run, Samples, train_loader, val_loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler


class Backwards(Sampler[int]):
    """An order of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))


class OwnLoaders(Net):
    """Makes its loaders itself, with its own distributed sampler."""

    def train_dataloader(self) -> Any:
        data = Samples(24, seed=1)
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=True, seed=5)
        return DataLoader(data, batch_size=2, sampler=sampler)

    def val_dataloader(self) -> Any:
        data = Samples(12, seed=2)
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=2, sampler=sampler)


class Reloaded(Net):
    """Makes a loader anew in each epoch: each time over other data."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(24, seed=10 + self.current_epoch), batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return val_loader(seed=20 + self.current_epoch)


class DictBatches(Net):
    """Batches that are dictionaries."""

    def loss(self, batch: Any) -> Any:
        return super().loss([batch["x"], batch["y"]])


def as_dicts(samples: Any) -> Any:
    x, y, index = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "index": list(index)}


def from_module(run: Run) -> Any:
    return run.trainer.fit(run.module)


def without_validation_data(run: Run) -> Any:
    return run.trainer.fit(run.module, run.train)


class Pairs(BatchSampler):
    """Batches of the user's own making, of a sample from the front and one from the back of the order."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return iter([[order[n], order[-1 - n]] for n in range(len(order) // 2)])


def batches_by_user() -> Any:
    return DataLoader(Samples(24), batch_sampler=Pairs(RandomSampler(Samples(24)), 2, False))


ROWS = [
    Row("no shuffling", train=lambda: train_loader(shuffle=False)),
    Row("workers", train=lambda: train_loader(num_workers=1), kill={"point": "forward"}),
    Row("persistent workers", train=lambda: train_loader(num_workers=1, persistent_workers=True), kill={"point": "forward"}),
    Row("drop_last", train=lambda: train_loader(num_samples=26, drop_last=True), kill_devices=2),
    Row("custom sampler", train=lambda: train_loader(shuffle=False, sampler=Backwards(24))),
    Row("batch sampler", train=batches_by_user, val=lambda: val_loader(num_workers=1)),
    Row("own distributed sampler", OwnLoaders, trainer={"use_distributed_sampler": False}, calls=from_module),
    Row("reloaded every epoch", Reloaded, trainer={"reload_dataloaders_every_n_epochs": 1}, calls=from_module),
    Row(
        "reloaded every second epoch",
        Reloaded,
        trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
        calls=from_module,
    ),
    Row(
        "dictionaries",
        DictBatches,
        train=lambda: train_loader(collate_fn=as_dicts),
        val=lambda: val_loader(collate_fn=as_dicts),
    ),
    Row("no validation data", calls=without_validation_data, kill={"point": "forward"}),
    Row("weighted sampler", train=lambda: train_loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 24, 24, False))),
]
