"""A training on streams: options as JSON in the first argument, results as JSON files in the directory."""

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from lightning_ft import FTStrategy, ShardingOptions, SupervisionOptions
from lightning_ft.callbacks import LoaderPosition
from lightning_ft.testing import FaultPlan, end_process, fingerprint

warnings.filterwarnings("ignore")


@dataclass
class Options:
    strategy: str = "FTStrategy"
    devices: int = 3
    ft: dict[str, Any] = field(default_factory=dict)
    snapshot_every: int = 10
    source: str = "iterable"
    counts: tuple[int, ...] = (24, 24, 24)
    """Samples of each rank's stream."""
    batch_size: int = 4
    workers: int = 0
    max_epochs: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    skip: dict[str, list[int]] = field(default_factory=dict)
    """Batches, by rank, in which `training_step` returns None."""
    none: dict[str, list[int]] = field(default_factory=dict)
    """Batches, by rank, that are None."""
    kill_worker: list[int] = field(default_factory=list)
    """Rank and batch at which a worker ends as if it had used up the memory."""
    save_every: int = 0
    ckpt_path: str | None = None
    estimate_in: str = ""
    """Whether the loaders are asked for before the optimizers are there."""
    position: str = ""
    """`on_world_size_change` of a `LoaderPosition`."""
    buffers: bool = False
    dropout: float = 0.0


class Stream(IterableDataset[Tensor]):
    """Numbers that tell the rank and the position, the same each time."""

    def __init__(self, counts: tuple[int, ...], *, sized: bool = False) -> None:
        self.counts = counts
        if sized:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[Tensor]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        assert size <= len(self.counts)
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.counts[rank], step):
            yield torch.tensor(1000 * rank + index)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.counts[torch.distributed.get_rank()]


class Collate:
    def __init__(self, options: Options) -> None:
        self.none, self.batch_size, self.kill_worker = options.none, options.batch_size, options.kill_worker

    def __call__(self, samples: list[Tensor]) -> Tensor | None:
        batch = torch.stack(samples)
        rank, index = divmod(int(batch[0]), 1000)
        if [rank, index // self.batch_size] == self.kill_worker and get_worker_info() is not None:
            with contextlib.suppress(FileExistsError):
                Path("killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return None if index // self.batch_size in self.none.get(str(rank), []) else batch


def make_loader(options: Options) -> Any:
    kind, _, mode = options.source.partition(":")
    if kind == "joint":  # of the first loader, all ranks have a part; the second one is shorter
        a, b = options.counts
        loaders = {"a": shuffled(range(a), options), "b": shuffled(range(1000, 1000 + b), options)}
        return CombinedLoader(loaders, mode)
    if kind == "batches":
        numbers: Any = range(options.counts[0])
        return DataLoader(numbers, batch_sampler=Backwards(RandomSampler(numbers), options.batch_size, drop_last=False))
    if kind == "whole":
        return shuffled(range(options.counts[0]), options)
    loader = DataLoader(
        Stream(options.counts, sized=kind == "sized"),
        batch_size=options.batch_size,
        num_workers=options.workers,
        collate_fn=Collate(options),
    )
    if kind == "stateful":
        return StatefulBatches(loader)
    if kind == "continuing":
        return ContinuingBatches(loader)
    return Batches(loader) if kind == "custom" else loader


class Backwards(BatchSampler):
    """A batch sampler of one's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


def shuffled(numbers: range, options: Options) -> DataLoader[int]:
    return DataLoader(numbers, options.batch_size, shuffle=True, num_workers=options.workers)  # type: ignore[arg-type]


class Batches:
    """Neither a loader nor a dataset: anything that can be iterated."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class StatefulBatches(Batches):
    """Refuses to be read from its start in a process that came later."""

    first = position = 0
    may_start = os.environ.get("LIGHTNING_FT_INCARNATION", "0") == "0"

    def __iter__(self) -> Iterator[Any]:
        assert self.may_start, "read from its start"
        first, self.first = self.first, 0
        for index in range(first, len(self.batches)):
            self.position = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.may_start, self.first = True, state["position"]


class ContinuingBatches:
    """Begins wherever it is, and anew only once it was at its end."""

    position = 0

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Model(LightningModule):
    def __init__(self, options: Options) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if options.buffers else nn.Identity()
        self.net = nn.Sequential(nn.Linear(2, 8), norm, nn.Dropout(options.dropout), nn.Linear(8, 1))
        self.options = options
        self.trained: list[list[Any]] = []
        self.validations: list[int] = []

    def train_dataloader(self) -> Any:
        return make_loader(self.options)

    def val_dataloader(self) -> Any:
        counts = tuple(count + 4 for count in self.options.counts)  # uneven too, but never empty
        return DataLoader(Stream(counts), batch_size=self.options.batch_size)

    def _loss(self, batch: Tensor) -> Tensor:
        inputs = torch.stack([batch % 1000, batch // 1000], dim=1) / 100
        return (self.net(inputs) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        loss = torch.stack([self._loss(part) for part in parts]).sum()
        self.log("loss", loss, sync_dist=True)
        samples = torch.cat(parts).tolist()
        if getattr(self.trainer.strategy, "has_own_batch", True):
            self._record(samples)
        rank, index = divmod(samples[0], 1000)
        return None if index // self.options.batch_size in self.options.skip.get(str(rank), []) else loss

    def _record(self, samples: list[int]) -> None:
        """Write down which samples a ticket consists of, before it is trained."""
        self.trained.append([self.current_epoch, samples])
        loader = self.trainer.train_dataloader
        ticket = getattr(loader["a"] if isinstance(loader, dict) else loader, "ticket", None)
        with open(f"samples_{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps({"epoch": self.current_epoch, "ticket": ticket, "samples": samples}) + "\n")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append(self.trainer.global_step)

    def setup(self, stage: str) -> None:
        if self.options.estimate_in == "setup":
            assert self.trainer.estimated_stepping_batches

    def configure_optimizers(self) -> Any:
        if self.options.estimate_in == "configure_optimizers":
            assert self.trainer.estimated_stepping_batches
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    seed_everything(7, verbose=False)
    callbacks: list[Callback] = [FaultPlan.from_environ()]
    if options.position:
        callbacks.append(LoaderPosition(options.position))  # type: ignore[arg-type]
    if options.save_every:
        callbacks.append(ModelCheckpoint("steps", "{step}", every_n_train_steps=options.save_every, save_top_k=-1))
    supervision = SupervisionOptions(**options.ft.pop("supervision", {}))
    sharding = ShardingOptions(memory_snapshot_every_n_steps=options.snapshot_every)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=FTStrategy(supervision=supervision, sharding=sharding, **options.ft)
        if options.strategy == "FTStrategy"
        else options.strategy,
        max_epochs=options.max_epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": bool(options.save_every), **options.trainer},
    )
    model = Model(options)
    trainer.fit(model, ckpt_path=options.ckpt_path)
    result = {
        "fingerprint": fingerprint(trainer),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "num_batches": trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        "trained": model.trained,
        "validations": model.validations,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }
    slot = os.environ.get("LIGHTNING_FT_SLOT", trainer.global_rank)
    Path(f"result_{slot}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    end_process()
