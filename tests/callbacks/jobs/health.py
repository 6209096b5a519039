"""A training that watches its health. The argument: options as JSON; each rank writes what it knows at the end."""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import AsyncCheckpoint, TrainingHealth
from lightning_ft.testing import FaultPlan

warnings.filterwarnings("ignore")


class Model(LightningModule):
    flops_per_batch = 1e6

    def __init__(self, slow: int | None = None, slow_from: int = 0) -> None:
        super().__init__()
        self.slow, self.slow_from = slow, slow_from
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def configure_model(self) -> None:
        if self.device_mesh is not None and self.device_mesh.mesh_dim_names == ("data_parallel", "tensor_parallel"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_slow:
            time.sleep(0.2)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    @property
    def is_slow(self) -> bool:
        place = int(os.environ.get("LIGHTNING_FT_SLOT", os.environ.get("LOCAL_RANK", "0")))
        again = getattr(self.trainer.strategy, "engine", None) is not None and self.trainer.strategy.engine.incarnation > 0
        return place == self.slow and not again and self.trainer.global_step >= self.slow_from

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class DamagedOnReturn(Callback):
    """What should never happen: when a rank returns, all ranks train on with other weights; and again after a rollback."""

    num_damages = 0
    was_alone = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        (health,) = [callback for callback in trainer.callbacks if isinstance(callback, TrainingHealth)]
        self.was_alone = self.was_alone or len(strategy.members) == 1
        due = [self.was_alone and len(strategy.members) == 2, any(verdict.is_bad for verdict in health.verdicts)]
        if self.num_damages < 2 and due[self.num_damages]:
            self.num_damages += 1
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(20.0)

    def state_dict(self) -> dict[str, Any]:
        return {"num_damages": self.num_damages, "was_alone": self.was_alone}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_damages, self.was_alone = state_dict["num_damages"], state_dict["was_alone"]


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 16, generator=generator)
    teacher = torch.randn(16, 4, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).tanh() + 0.3 * torch.randn(num_samples, 4, generator=generator))


def main() -> None:
    options = json.loads(sys.argv[1])
    seed_everything(2, verbose=False)
    health = TrainingHealth(peak_flops=1e12, **options.get("health", {}))
    bar = RichProgressBar(refresh_rate=1) if options.get("rich") else TQDMProgressBar(refresh_rate=1)
    callbacks: list[Any] = [health, bar]
    callbacks += [AsyncCheckpoint("saved", every_n_train_steps=25, save_top_k=-1)] if options.get("save") else []
    callbacks += [DamagedOnReturn()] if options.get("damaged") else []
    strategy: Any = options["strategy"]
    if strategy == "ft":
        strategy = FTStrategy(**options.get("ft", {}))
        callbacks.append(FaultPlan.from_environ())
    elif strategy == "model_parallel":
        strategy = ModelParallelStrategy(data_parallel_size=options["devices"], tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        strategy=strategy,
        max_steps=options["steps"],
        callbacks=callbacks,
        logger=CSVLogger("logs", name="", flush_logs_every_n_steps=1),
        log_every_n_steps=10,
        enable_checkpointing=bool(options.get("save")),
        enable_model_summary=False,
        val_check_interval=40,
        num_sanity_val_steps=1,
    )
    model = Model(options.get("slow"), options.get("slow_from", 0))
    loader = DataLoader(data(4096), batch_size=8, shuffle=True)
    trainer.fit(model, loader, DataLoader(data(64), batch_size=8), ckpt_path=options.get("ckpt_path"))
    told = {"report": health.report(), "verdicts": [str(verdict) for verdict in health.verdicts]}
    slot = os.environ.get("LIGHTNING_FT_SLOT", str(trainer.global_rank))
    Path(f"health_{slot}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
