"""Trains a module that divides its layers among the ranks of a row, several ways in one job, or whole on one device."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import AsyncCheckpoint, TrainingHealth
from lightning_ft.sharding.full_state import gather_full
from lightning_ft.testing import fingerprint

NUM_SAMPLES = 70  # the last batches are fewer than there are ranks
SEED = 1


class Batches:
    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.count)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(17), nn.Linear(17, 22), nn.Linear(22, 17)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Net(LightningModule):
    """Has layers that tensor parallelism divides, and others that it does not.

    Args:
        shards: Whether it applies FSDP2 to its blocks by itself.
        on_meta: Whether its blocks are made without storage.
        dropout: How much of its input is left out.

    """

    def __init__(self, shards: bool = False, on_meta: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.samples: list[int] = []
        self._shards = shards
        self._is_divided = False
        self.dropout, self.first, self.last = nn.Dropout(dropout), nn.Linear(8, 17), nn.Linear(17, 4)
        with torch.device("meta" if on_meta else "cpu"):
            self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def configure_model(self) -> None:
        if self.device_mesh is None or self._is_divided:
            return
        self._is_divided = True
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            if self._shards:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(self.dropout(inputs))
        for block in self.blocks:
            outputs = block(outputs)
        return self.last(outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, indices = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.losses.append(loss.item())
        self.samples += indices.tolist()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(indices))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=True)


def run(
    strategy: Any,
    devices: int,
    batch_size: int,
    *,
    save: str | None = None,
    resume: str | None = None,
    apart: bool = False,
    num_samples: int = NUM_SAMPLES,
    differs: bool = False,
    net: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    seed_everything(SEED, verbose=False)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 4, generator=generator)
    samples = TensorDataset(inputs, targets, torch.arange(num_samples))
    if apart:
        torch.manual_seed(int(os.environ["LIGHTNING_FT_SLOT"]))
    module = Net(**(net or {}))
    saves = [AsyncCheckpoint(save, filename="{step}", every_n_train_steps=6, save_top_k=-1)] if save else []
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        callbacks=[TrainingHealth(), *saves],
        enable_checkpointing=bool(saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "gradient_clip_val": 0.3, **options},
    )
    # In the order in which Lightning's sampler deals to ranks, whose batches of a step are one here.
    one = DistributedSampler(samples, num_replicas=1, rank=0, seed=SEED) if strategy == "auto" else None
    loader = DataLoader(samples, batch_size=batch_size, sampler=one)
    if differs:
        trainer.validate(module, Batches(next(iter(loader)), 1 + trainer.global_rank), verbose=False)
    trainer.fit(module, loader, DataLoader(samples, batch_size=4), ckpt_path=resume)
    metrics = {key: value.item() for key, value in trainer.callback_metrics.items() if not key.startswith("ft/")}
    found = {"metrics": metrics, "losses": module.losses, "samples": module.samples, "step": trainer.global_step}
    found["batches"] = trainer.num_training_batches
    predicted: Any = trainer.predict(module, DataLoader(TensorDataset(*samples[:23]), batch_size=4))
    found["predicted"] = torch.cat(predicted).tolist()
    trainer.validate(module, DataLoader(samples, batch_size=4), verbose=False)
    found["val_loss"] = trainer.callback_metrics["val_loss"].item()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    found["weights"] = gather_full(module.state_dict())
    found["optimizer"] = gather_full(trainer.optimizers[0].state_dict())
    found["fingerprint"] = fingerprint(trainer)
    return found


def main(devices: int, batch_size: int, variants: dict[str, dict[str, Any]]) -> None:
    warnings.filterwarnings("ignore")
    for name, options in variants.items():
        strategy = FTStrategy(options.pop("shard_size"), tensor_parallel_size=2)
        found = run(strategy, devices, batch_size, **options)
        torch.save(found, Path(f"{name}_{os.environ['LIGHTNING_FT_SLOT']}.pt"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
