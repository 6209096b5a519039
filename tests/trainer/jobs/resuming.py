"""A training that resumes: options as JSON in the first argument; each rank leaves what it saw in a JSON file."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.testing import FaultPlan

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not hasattr(self.net[0], "unshard"):
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def describe(trainer: Trainer) -> dict[str, Any]:
    (optimizer,) = trainer.optimizers
    moments = [whole(state["exp_avg"]).flatten().tolist() for state in optimizer.state.values()]
    return {
        "weights": {name: whole(value).flatten().tolist() for name, value in trainer.lightning_module.state_dict().items()},
        "moments": moments,
        "lr": optimizer.param_groups[0]["lr"],
        "global_step": trainer.global_step,
        "best_model_path": getattr(trainer.checkpoint_callback, "best_model_path", ""),
        "ckpt_path": str(trainer.ckpt_path),
        "attempt": getattr(trainer.strategy, "attempt", 0),
    }


class AtStart(Callback):
    found: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found = describe(trainer)


def main() -> None:
    options = json.loads(sys.argv[1])
    seed_everything(3, verbose=False)
    devices = options["devices"]
    strategies = {"ft": lambda: FTStrategy(**options.get("ft", {})), "mps": lambda: ModelParallelStrategy(devices, 1)}
    kind = {"ours": AsyncCheckpoint, "lightning": ModelCheckpoint}[options.get("callback", "ours")]
    checkpoints = {"dirpath": "checkpoints", "filename": "{step}", "save_top_k": -1, **options.get("checkpoint", {})}
    start = AtStart()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategies[options["strategy"]]() if options["strategy"] in strategies else options["strategy"],
        max_epochs=options.get("max_epochs", 2),
        max_steps=options.get("max_steps", -1),
        callbacks=[FaultPlan.from_environ(), start, kind(**checkpoints)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(72, 8, generator=generator), torch.randn(72, 2, generator=generator))
    loaders = DataLoader(data, batch_size=4, shuffle=options["strategy"] == "ft"), DataLoader(data, batch_size=12)
    asked = {name: options[name] for name in ("ckpt_path", "weights_only") if name in options}
    trainer.fit(Model(), *loaders, **asked)
    result = {"start": start.found, "end": describe(trainer)}
    if options.get("validate"):
        result["validated"] = trainer.validate(Model(), loaders[1], ckpt_path="last", verbose=False)
    slot = os.environ.get("LIGHTNING_FT_SLOT", trainer.global_rank)
    Path(f"result_{slot}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
