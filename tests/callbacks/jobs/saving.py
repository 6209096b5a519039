"""A training that saves all the time and writes down what each checkpoint must hold. The argument: options as JSON."""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.checkpoint.lightning_dict import join, split
from lightning_ft.testing import FaultPlan

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.log("own", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Sharded(Model):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class Recorded(AsyncCheckpoint):
    """Writes down what each checkpoint must hold."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        held = digest(state_of(trainer))
        if not trainer.is_global_zero:  # buffers are as rank 0 has them; in all else ranks are alike
            return
        line = json.dumps({"path": str(Path(filepath).relative_to(Path.cwd())), "digest": held})
        with open(f"expected_{os.getpid()}.jsonl", "a") as file:
            file.write(line + "\n")


def state_of(trainer: Trainer) -> dict[str, Any]:
    dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    if isinstance(trainer.strategy, ModelParallelStrategy):
        dumped = join(*split(dumped, []))  # with numbers for the optimizer's parameters, as a checkpoint is read
    return {key: dumped[key] for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def digest(value: Any) -> str:
    """Of nested data with tensors, DTensors as a whole; keys sorted."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        content = value.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return (str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest())
    if isinstance(value, dict):
        return sorted((str(key), _plain(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def make_strategy(name: str, options: dict[str, Any]) -> Any:
    if name == "FTStrategy":
        return FTStrategy(**options)
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if name == "ModelParallelStrategy" else name


def main() -> None:
    options = {"strategy": "auto", "devices": 1, "max_epochs": 2, "ft": {}, "callbacks": [], "average": False}
    options |= json.loads(sys.argv[1])
    seed_everything(3, verbose=False)
    savers = [Recorded(**{"filename": "{step}", "save_top_k": -1, **arguments}) for arguments in options["callbacks"]]
    average = [WeightAveraging(avg_fn=get_ema_avg_fn(0.9))] if options["average"] else []
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        strategy=make_strategy(options["strategy"], options["ft"]),
        max_epochs=options["max_epochs"],
        callbacks=[FaultPlan.from_environ(), *average, *savers],
        logger=CSVLogger(".", name="csv"),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    inputs, targets = torch.randn(96, 16), torch.randn(96, 4)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    model = Sharded() if options["strategy"] == "ModelParallelStrategy" else Model()
    trainer.fit(model, data, DataLoader(TensorDataset(inputs[:8], targets[:8]), batch_size=4))
    if options["strategy"] == "FTStrategy":
        trainer.save_checkpoint("final/end.ckpt/")
        if trainer.is_global_zero:
            line = {"path": "final/end.ckpt", "digest": digest(state_of(trainer))}
            Path(f"expected_{os.getpid()}_final.jsonl").write_text(json.dumps(line))
    result = {
        "global_step": trainer.global_step,
        "best": [saver.best_model_path for saver in savers],
        "last": [saver.last_model_path for saver in savers],
        "top": [sorted(saver.best_k_models) for saver in savers],
    }
    slot = os.environ.get("LIGHTNING_FT_SLOT", trainer.global_rank)
    Path(f"result_{slot}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
