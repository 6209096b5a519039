"""A training without a Trainer, replicated and sharded. Argument: "train" or "reshard"; see the tests."""

import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.checkpoint import (
    PendingSave,
    async_save_training_state,
    load_sharded,
    load_training_metadata,
    load_training_state,
    save_frozen_training_state,
    save_sharded,
    save_training_state,
)
from lightning_ft.data import LoaderState


class Training:
    """A module that is random in its steps, trained by two optimizers."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Dropout(0.5), nn.Linear(33, 5))
        if kind == "sharded":
            fully_shard(layers[3])
            self.module: nn.Module = fully_shard(layers)
        else:
            self.module = DistributedDataParallel(layers)
        first, second = list(layers[:2].parameters()), list(layers[3].parameters())
        self.optimizers = [
            torch.optim.AdamW([{"params": first[1:], "lr": 0.1}, {"params": first[:1]}], foreach=True),
            torch.optim.SGD(second, lr=0.1, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [1, 3])
        torch.manual_seed(seed + dist.get_rank())
        self.step = 0

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.module(torch.randn(6, 7)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1

    def save(self, path: str, **options: Any) -> PendingSave:
        position = LoaderState(0, 0, dist.get_rank(), dist.get_world_size(), 10 * self.step + dist.get_rank())
        options = {
            "step": self.step,
            "scheduler": self.scheduler,
            "loader_state": position,
            "extra": {"a": (1, 2)},
            **options,
        }
        return async_save_training_state(self.module, self.optimizers, path, **options)

    def values(self) -> dict[str, list[Any]]:
        """Everything that must be the same, as plain data."""
        layers = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        found = dict(layers.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                found |= {f"{number}.{index}.{name}": value for name, value in state.items()}
        values = {name: whole(value).tolist() for name, value in found.items() if isinstance(value, Tensor)}
        values["lr"] = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return values

    def random(self) -> float:
        return torch.rand(()).item()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def error_of(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(kind: str) -> dict[str, Any]:
    training = Training(kind, seed=1)
    training.train(2)
    at_two = training.values()
    save = training.save(f"{kind}/step=2")
    training.train(2)
    wrong = {"step": dist.get_rank(), "extra": None}
    differing = error_of(lambda: training.save(f"{kind}/differs", **wrong).wait())
    unsupported = error_of(
        lambda: training.save(f"{kind}/object", loader_state=object() if dist.get_rank() else None).wait()
    )
    final, random = training.values(), training.random()
    training.train(1)
    training.save(f"{kind}/last", replaces=[f"{kind}/differs"])  # nobody waits for it
    training.train(1)
    return {
        "done": save.done,
        "differing": differing,
        "unsupported": unsupported,
        "at_two": at_two,
        "final": final,
        "random": random,
        "resumed": resume(kind),
    }


def resume(kind: str) -> dict[str, Any]:
    training = Training(kind, seed=2)
    options: dict[str, Any] = {"scheduler": training.scheduler}
    unasked = {**options, "rank_local_transform": lambda *args: {}}
    unneeded = error_of(lambda: load_training_state(training.module, training.optimizers, f"{kind}/step=2", **unasked))
    metadata = load_training_state(training.module, training.optimizers, f"{kind}/step=2", **options)
    training.step = metadata.step
    training.train(2)
    return {
        "unneeded": unneeded,
        "status": metadata.status,
        "loader_state": metadata.loader_state,
        "extra": metadata.extra,
        "final": training.values(),
        "random": training.random(),
    }


def reshard(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    training = Training(kind, seed=3)
    module, optimizers, path = training.module, training.optimizers, f"{kind}/step=2"
    fresh = training.values()

    def transform(old: Any, saved: int, rank: int, world_size: int) -> dict[str, Any]:
        position = [saved, rank, world_size, *(one["loader_state"]["batch_idx"] for one in old)]
        return {"loader_state": position, "typed_scheduler_state": None, "rng": None}

    def broken(*args: Any) -> dict[str, Any]:
        return {"loader_state": 1} if rank == 1 else transform(*args)

    refused = [
        error_of(lambda: load_training_state(module, optimizers, path)),
        error_of(lambda: load_training_state(module, optimizers, path, allow_world_size_change=True)),
        error_of(
            lambda: load_training_state(module, optimizers, path, allow_world_size_change=True, rank_local_transform=broken)
        ),
        error_of(lambda: load_training_state(module, optimizers[::-1], path)),
        error_of(lambda: load_sharded(module, optimizers[::-1], path)),
    ]
    untouched = training.values() == fresh
    looked = load_training_metadata(path)
    metadata = load_training_state(
        module, optimizers, path, allow_world_size_change=True, rank_local_transform=transform, scheduler=training.scheduler
    )
    values = training.values()
    save_sharded(module, optimizers, f"{kind}/sharded")
    frozen = get_model_state_dict(module), [get_optimizer_state_dict(module, optimizer) for optimizer in optimizers]
    threads = [
        threading.Thread(target=save_frozen_training_state, args=(*frozen, f"{kind}/frozen{number}"), kwargs={"step": 7})
        for number in range(2)
    ]
    for thread in threads[:: 1 if rank else -1]:  # in another order on each rank, beside another save
        thread.start()
    save_training_state(module, optimizers, f"{kind}/meanwhile", step=8)
    for thread in threads:
        thread.join()
    again = []
    for name in ("sharded", "frozen0", "frozen1", "meanwhile"):
        other = Training(kind, seed=4)
        load_sharded(other.module, other.optimizers, f"{kind}/{name}", timeout=timedelta(minutes=2))
        again.append(other.values() == values)
    return {
        "refused": refused,
        "untouched": untouched,
        "looked": [looked.status, looked.step, looked.loader_state],
        "position": metadata.loader_state,
        "values": values,
        "again": again,
    }


def be_late() -> list[str]:
    """What is told if rank 0 saves, and the others come too late, and if it loads, and they don't come at all."""
    training = Training("replicated", seed=5)
    few, others = timedelta(seconds=0.3), dist.get_rank() > 0
    if others:
        dist.barrier()
    told = [error_of(lambda: save_sharded(training.module, training.optimizers, "replicated/late", timeout=few))]
    if others:
        return told
    dist.barrier()
    return [*told, error_of(lambda: load_sharded(training.module, None, "replicated/sharded", timeout=few))]


def main() -> None:
    dist.init_process_group("gloo")
    phase = {"train": train, "reshard": reshard}[sys.argv[1]]
    result = {kind: phase(kind) for kind in ("replicated", "sharded")}
    if sys.argv[1] == "reshard":
        result["late"] = be_late()
    Path(f"{sys.argv[1]}_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
