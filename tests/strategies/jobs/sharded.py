"""Trains several ways in one job, under any strategy, and leaves whole tensors of each."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.sharding.full_state import gather_full, num_local_bytes
from lightning_ft.sharding.options import ShardingOptions

warnings.filterwarnings("ignore")
NUM_SAMPLES = 144  # divided evenly by 2, 3 and 4 ranks
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(17), nn.Linear(17, 19), nn.Linear(19, 17)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Deep(LightningModule):
    """Sizes that nothing divides; logs the norm of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.make()

    def make(self) -> None:
        self.first, self.last = nn.Linear(8, 17), nn.Linear(17, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs)
        for block in self.blocks:
            outputs = block(outputs)
        return self.last(outputs)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=True)


class Functional(Deep):
    """Uses parameters of a block that it does not call."""

    def loss(self, batch: Any) -> Tensor:
        penalty = self.blocks[1].up.weight.square().sum()
        return (
            super().loss(batch) + 0.01 * penalty + nn.functional.linear(batch[0], self.first.weight[:, :8]).square().mean()
        )


class Twice(Deep):
    """Two forward passes before one backward pass, under checkpointing, of a block that occurs twice."""

    def make(self) -> None:
        super().make()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[0], self.blocks[1]])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs)
        for block in self.blocks:
            outputs = checkpoint(block, outputs, use_reentrant=False)
        return self.last(outputs)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]) + self(-batch[0]), batch[1])


class Late(Deep):
    """Makes its layers without storage in ``configure_model``, and shards some of them by itself."""

    def make(self) -> None:
        self.first: Any = None

    def configure_model(self) -> None:
        if self.first is None:
            with torch.device("meta"):
                super().make()
            if self.device_mesh is not None:
                for block in self.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Reduced(Deep):
    """Logs nothing that Lightning can't compute of gradients that are sharded."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class ByHand(Reduced):
    """Shards its layers by itself."""

    def configure_model(self) -> None:
        if not isinstance(self.first, FSDPModule):
            for part in (self.first, *self.blocks, self.last):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=POLICY)


MODULES = {
    "Deep": Deep,
    "Functional": Functional,
    "Twice": Twice,
    "Late": Late,
    "Reduced": Reduced,
    "ByHand": ByHand,
}


def run(name: str, options: dict[str, Any], strategy: Any, devices: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module = MODULES[options.pop("module", "Deep")]()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(NUM_SAMPLES, 8, generator=generator), torch.randn(NUM_SAMPLES, 4, generator=generator)
    samples = TensorDataset(inputs, targets)
    averaging = EMAWeightAveraging(decay=0.9)
    resume, predict = options.pop("resume", None), options.pop("predict", 0)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        callbacks=[averaging] if options.pop("average", False) else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 2, **options},
    )
    loader = DataLoader(samples, batch_size=3, shuffle=True)
    trainer.fit(module, loader, DataLoader(samples, batch_size=4), ckpt_path=resume)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    found = {
        "weights": gather_full(module.state_dict()),
        "optimizer": gather_full(trainer.optimizers[0].state_dict()),
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "losses": list(module.losses),
        "local_bytes": num_local_bytes(list(module.parameters())),
    }
    trainer.save_checkpoint(f"{name}.ckpt")
    if predict:  # a number that some ranks have more of than others
        uneven = TensorDataset(*samples[:predict])
        found["validated"] = trainer.validate(module, DataLoader(samples, batch_size=4), verbose=False)
        found["predicted"] = trainer.predict(module, DataLoader(uneven, batch_size=4))
    return found


def main(strategy: str, devices: int, variants: dict[str, dict[str, Any]]) -> None:
    for name, options in variants.items():
        policy, reshard = POLICY if options.pop("policy", False) else None, options.pop("reshard", None)
        sharding = ShardingOptions(units=options.pop("units", None), mp_policy=policy, reshard_after_forward=reshard)
        size = options.pop("shard_size", 1)
        chosen: Any = "ddp" if strategy == "ddp" else FTStrategy(size, sharding=sharding)
        if options.get("module") == "ByHand":
            chosen = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
        found = run(name, options, chosen, devices)
        slot = os.environ.get("LIGHTNING_FT_SLOT") or os.environ["RANK"]
        torch.save(found, Path(f"{strategy}_{name}_{slot}.pt"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
