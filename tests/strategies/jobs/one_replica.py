"""A module sharded over all ranks, and what each rank trained in each step."""

import json
import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from pacing import WaitsForFaults
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import AsyncCheckpoint
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.strategies import replica_memory
from lightning_ft.testing import FaultPlan

NUM_SAMPLES, BATCH_SIZE = 96, 2


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator), torch.randn(3, generator=generator)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, inputs, targets = batch
        self.ids = ids.tolist() if self.trainer.strategy.has_own_batch else []
        self.seen += 1
        loss: Tensor = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("test_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def train_in_one_process(steps: list[tuple[int, list[list[int]]]]) -> list[Tensor]:
    """Train on the batches of each step, given with its epoch; return the weights."""
    samples, net = Samples(), make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch, batches in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5**epoch
        losses = []
        for ids in batches:
            _, inputs, targets = zip(*(samples[index] for index in ids), strict=True)
            losses.append(nn.functional.mse_loss(net(torch.stack(inputs)), torch.stack(targets)))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


class Records(Callback):
    """Writes down which samples were in each step, and what came out."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        slot = trainer.strategy.engine.slot
        seen = {"step": trainer.global_step, "ids": pl_module.ids, "seen": pl_module.seen.item(), "time": time.monotonic()}
        seen |= {"members": list(trainer.strategy.members), "epoch": trainer.current_epoch}
        with open(f"steps_{slot}.jsonl", "a") as file:
            file.write(json.dumps(seen) + "\n")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in pl_module.parameters()]
        result = {
            "weights": [tensor.tolist() for tensor in whole],
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "pid": os.getpid(),
            "newest": [callback.best_model_path for callback in trainer.checkpoint_callbacks[1:]],
            "last": [callback.last_model_path for callback in trainer.checkpoint_callbacks[1:]],
            "size": trainer.strategy.engine.replica.size,
            "placed": all(
                p.device_mesh.get_coordinate() == (trainer.strategy.engine.replica.shard,)
                for p in pl_module.parameters()
                if isinstance(p, DTensor)
            ),
            "same": getattr(pl_module, "ours", None) in (None, [id(p) for p in pl_module.parameters()]),
        }
        with open(f"result_{trainer.strategy.engine.slot}.json", "w") as file:
            json.dump(result, file)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.ours = [id(p) for p in pl_module.parameters()]
        with open(f"pid_{trainer.strategy.engine.slot}_{trainer.strategy.engine.incarnation}", "w") as file:
            file.write(str(os.getpid()))


def main(options: dict[str, Any]) -> None:
    if options.get("without_memory"):
        os.environ.pop("LIGHTNING_FT_MEMORY", None)  # as on a system that has none
    if options.get("unknown_torch"):
        replica_memory.missing_names = lambda: ("FSDPParam._init_extensions",)
    seed_everything(1)
    sharding = ShardingOptions(memory_snapshot_every_n_steps=options.get("every", 4))
    each_step: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 1, "save_last": True}
    saving = [ModelCheckpoint("stock", **each_step), AsyncCheckpoint("async", **each_step)] if options.get("saves") else []
    pacing = [WaitsForFaults()] if options.get("waits") else []
    trainer = Trainer(
        accelerator="cpu",
        devices=options.get("devices", 3),
        strategy=FTStrategy(options.get("shard_size", "all"), sharding=sharding, **options.get("strategy", {})),
        max_epochs=options.get("max_epochs", 2),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[Records(), ModelCheckpoint("checkpoints", save_top_k=-1), *saving, FaultPlan.from_environ(), *pacing],
        **options.get("trainer", {}),
    )
    model = Model()
    loader = DataLoader(Samples(), batch_size=BATCH_SIZE, shuffle=True)
    trainer.fit(model, loader, DataLoader(Samples(), batch_size=16) if options.get("validate") else None)
    if options.get("test"):
        (tested,) = trainer.test(model, DataLoader(Samples(), batch_size=8))
        with open(f"tested_{trainer.strategy.engine.slot}.json", "w") as file:
            json.dump(tested, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
