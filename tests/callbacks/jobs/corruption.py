"""Fits in which a bit of a rank's memory flips between two steps, one after the other; what each holds after each step."""

import ctypes
import hashlib
import json
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import ReplicaChecksums
from lightning_ft.elastic.protocol import RankEnvironment

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def place(trainer: Trainer) -> tuple[int, int]:
    environment = RankEnvironment.of_process()
    return (trainer.global_rank, 0) if environment is None else (environment.slot, environment.incarnation)


class Flips(Callback):
    """Flips a bit of a parameter, or of what the optimizer knows of it, after a step."""

    def __init__(self, flips: list[list[Any]]) -> None:
        self.flips = flips

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for flip in list(self.flips):
            slot, step, key = flip
            if place(trainer) == (slot, 0) and trainer.global_step == step:
                self.flips.remove(flip)
                parameter = pl_module.net[3].weight
                state = trainer.optimizers[0].state[parameter]
                memory = local(parameter if key == "weight" else state[key])
                ctypes.c_ubyte.from_address(memory.data_ptr() + memory.nbytes - 1).value ^= 1 << 3


class Holdings(Callback):
    """Writes down what this rank holds after each step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        digest = hashlib.sha256()
        for parameter in pl_module.parameters():
            for tensor in (parameter, *trainer.optimizers[0].state[parameter].values()):
                digest.update(local(tensor).numpy().tobytes())
        slot, incarnation = place(trainer)
        row = {"step": trainer.global_step, "slot": slot, "incarnation": incarnation, "digest": digest.hexdigest()}
        with open(f"{self.name}_{slot}_{incarnation}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    options = json.loads(sys.argv[1])
    for name, (flips, checks) in options["fits"].items():
        seed_everything(3, verbose=False)
        strategy = options.get("strategy") or FTStrategy(options.get("shard_size", 1))
        trainer = Trainer(
            accelerator="cpu",
            devices=options["devices"],
            strategy=strategy,
            max_steps=8,
            callbacks=[Flips(flips), ReplicaChecksums(**checks), Holdings(name)],
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(torch.randn(16 * options["devices"] * 4, 7))
        trainer.fit(Model(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
