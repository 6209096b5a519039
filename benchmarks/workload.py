"""The training that the benchmarks run: a small regression, plain Lightning, under the strategy that is asked for."""

import argparse
import hashlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation
from lightning_ft.sharding.full_state import gather_full
from lightning_ft.sharding.options import ShardingOptions

WIDTHS = {"0.01M": (64, 2), "0.1M": (208, 3), "10M": (1820, 4)}
"""Hidden width and number of hidden layers, by parameters."""


class Regression(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs and targets, the same in every process."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(num_samples, 32, generator=generator)
        self.targets = torch.randn(num_samples, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Network(LightningModule):
    """A multilayer perceptron.

    Args:
        size: A key of :data:`WIDTHS`.
        work: Seconds that each step waits, as if a device were busy.

    """

    def __init__(self, size: str, work: float = 0.0) -> None:
        super().__init__()
        width, depth = WIDTHS[size]
        layers: list[nn.Module] = [nn.Linear(32, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(width, 8))
        self.work = work
        self.raise_file: str | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        if self.raise_file is not None and os.path.exists(self.raise_file):
            os.unlink(self.raise_file)
            raise ValueError("somebody asked for an exception")
        if self.work:
            time.sleep(self.work)
        return nn.functional.mse_loss(self.network(inputs), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.network(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class HandSharded(Network):
    """The same, sharded as one would write it by hand for Lightning's ``ModelParallelStrategy``."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network[2:-1]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


class StepTimer(Callback):
    """Writes how long each batch took, in seconds, from the end of one to the end of the next.

    Args:
        path: Where rank 0 writes them as JSON.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
            Path(self.path).write_text(json.dumps(steps))


class StopFile(Callback):
    """Ends the training after the step in which rank 0 sees a file.

    Args:
        path: The file.

    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step % 10 == 0:
            trainer.should_stop = trainer.strategy.broadcast(os.path.exists(self.path))


class Checksums(Callback):
    """Records what each rank holds every so many steps, so that ranks which diverge are found."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % 25 == 0:
            digest = hashlib.sha256()
            values = list(pl_module.state_dict().values())
            for state in trainer.optimizers[0].state.values():
                values += state.values()
            for value in gather_full(values):
                digest.update(torch.as_tensor(value).numpy().tobytes())
            trainer.strategy.events.emit("weights", step=trainer.global_step, digest=digest.hexdigest()[:16])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ft", "ddp", "model_parallel"], default="ft")
    parser.add_argument("--size", choices=list(WIDTHS), default="0.1M")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epoch-steps", type=int, default=0, help="Steps of an epoch; 0: one epoch.")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--times", default=None, help="File for the duration of each step.")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--stop-file", default=None, help="End when this file appears.")
    parser.add_argument("--timeout", type=float, default=None)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--validate", action="store_true", help="Validate and save checkpoints, too.")
    parser.add_argument("--rerun", action="store_true", help="Validate each step with `RerunValidation`.")
    parser.add_argument("--resume", action="store_true", help="Go on where an earlier run was asked to stop.")
    parser.add_argument("--shard-size", default="1", help="Ranks of a replica, or `all`.")
    parser.add_argument("--snapshot-every", type=int, default=10, help="Steps between two snapshots in memory.")
    parser.add_argument("--directory", default=".")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    callbacks: list[Callback] = [StepTimer(options.times)] if options.times else []
    callbacks += [StopFile(options.stop_file)] if options.stop_file else []
    callbacks += [Checksums()] if options.stop_file and options.shard_size == "1" else []
    callbacks += [ModelCheckpoint(every_n_train_steps=20, save_top_k=1, save_last=True)] if options.validate else []
    callbacks += [ModelCheckpoint(save_top_k=0)] if options.resume and not options.validate else []
    callbacks += [RerunValidation()] if options.rerun else []
    per_epoch = options.epoch_steps or options.steps
    strategy: Any = options.strategy
    if strategy == "ft":
        shard_size = options.shard_size if options.shard_size == "all" else int(options.shard_size)
        sharding = ShardingOptions(memory_snapshot_every_n_steps=options.snapshot_every)
        policy = {"max_restarts": options.max_restarts, "spares": options.spares, "timeout": options.timeout}
        strategy = FTStrategy(shard_size, sharding=sharding, **policy)
    elif strategy == "model_parallel":
        strategy = ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        max_epochs=-(-options.steps // per_epoch),
        callbacks=callbacks,
        default_root_dir=os.path.abspath(options.directory),
        logger=False,
        enable_checkpointing=options.validate or options.resume,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=0.5 if options.validate else None,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Regression(per_epoch * options.batch_size * options.devices)
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    validation = DataLoader(Regression(8 * options.batch_size), batch_size=options.batch_size)
    network = (HandSharded if options.strategy == "model_parallel" else Network)(options.size, options.work)
    if options.stop_file:
        slot = os.environ.get("LIGHTNING_FT_SLOT")
        network.raise_file = os.path.join(os.path.abspath(options.directory), f"raise_{slot}")
    trainer.fit(network, loader, validation if options.validate else None, ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()
