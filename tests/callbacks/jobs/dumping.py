"""Fits whose tensors are dumped, under several strategies; their options as JSON in the first argument."""

import json
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import TensorDump
from lightning_ft.testing import FaultPlan

warnings.filterwarnings("ignore")


class Model(LightningModule):
    """Its last layer has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 130), nn.Tanh(), nn.Linear(130, 5), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(Callback):
    """Says how many hooks there are, and ends the training 20 steps or more after somebody made a file named ``stop``."""

    def __init__(self) -> None:
        self._is_asked = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % 20 == 19:
            # Who took over in this very step has begun no attempt yet: it ends one only if there are steps before the end.
            trainer.should_stop = trainer.strategy.broadcast(self._is_asked)
            self._is_asked = os.path.exists("stop")
        if trainer.global_step == 2:
            count = sum(len(module._forward_hooks) for module in pl_module.net.children())
            print(f"rank {trainer.global_rank} has {count} hooks", flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    devices = options["devices"]
    shard_size = options.get("shard_size")
    seed_everything(3, verbose=False)
    num_samples = options.get("num_samples", 96)
    data = TensorDataset(torch.randn(num_samples, 7))
    rollout_id = (lambda trainer: 0) if options.get("only_rollout_0") else options.get("rollout_id")
    callback = TensorDump(options.get("dirpath", "dumps"), rollout_id=rollout_id, config=options.get("config"))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FTStrategy(shard_size, max_restarts=1000) if shard_size else options.get("strategy", "auto"),
        max_epochs=options.get("max_epochs", 2),
        val_check_interval=options.get("val_check_interval"),
        accumulate_grad_batches=options.get("accumulate", 1),
        callbacks=[FaultPlan.from_environ(), callback, Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size = options.get("global_batch", 16) // devices
    validation = DataLoader(TensorDataset(data.tensors[0][:16]), batch_size=batch_size)
    # What Lightning puts in the place of an ordinary sampler where there are several devices: the same samples a step.
    sampler = DistributedSampler(data, 1, 0, seed=3) if devices == 1 else None
    trainer.fit(Model(), DataLoader(data, batch_size=batch_size, sampler=sampler), validation)


if __name__ == "__main__":
    main()
