"""Writes down what happens in a rank, so that two runs can be compared word for word."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.distributed.tensor import DTensor

HOOK_CALLERS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_lightning_datamodule_hook")


class Recorder(Callback):
    """Each step's logged values and weights, and which samples a ticket consists of.

    Args:
        record: Where to.
        samples: File that outlives this process.

    """

    def __init__(self, record: dict[str, Any], samples: Path) -> None:
        self.steps: list[Any] = record.setdefault("steps", [])
        self._samples = samples

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loader = trainer.train_dataloader
        ticket = getattr(loader, "ticket", None)
        if ticket is not None and isinstance(batch, list | tuple) and len(batch) == 3:
            with self._samples.open("a") as file:
                file.write(json.dumps([loader.plan.epoch, ticket, batch[2].tolist()]) + "\n")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append(
            {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "batch_idx": batch_idx,
                "outputs": plain(outputs),
                "weights": digest(dict(pl_module.named_parameters())),
                "progress_bar": plain({k: v for k, v in trainer.progress_bar_metrics.items() if k != "replicas"}),
                "logged": plain(trainer.logged_metrics),
            }
        )


@contextmanager
def hooks_recorded(record: dict[str, Any]) -> Iterator[None]:
    """Write down every hook of callbacks, modules and data modules in the order in which Lightning calls them."""
    hooks: list[str] = record.setdefault("hooks", [])
    originals = {name: getattr(call, name) for name in HOOK_CALLERS}

    def recording(name: str) -> Callable[..., Any]:
        kind = name.removeprefix("_call_").removesuffix("_hooks").removesuffix("_hook")

        def call_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            hooks.append(f"{kind}.{hook_name}")
            return originals[name](trainer, hook_name, *args, **kwargs)

        return call_hook

    for name in HOOK_CALLERS:
        setattr(call, name, recording(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(call, name, original)


def plain(value: Any) -> Any:
    """As JSON data that is equal only if the values are, bit for bit."""
    if isinstance(value, Tensor):
        return plain(value.item()) if value.numel() == 1 else digest(value)
    if isinstance(value, float):
        return f"{value:.9g} ({value.hex()})"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if isinstance(value, int | str | type(None)) else repr(value)


def digest_elsewhere(value: Any, directory: Path) -> str:
    """A digest that does not depend on the directory whose path is in the value."""
    return digest(json.loads(json.dumps(plain(value)).replace(str(directory), ".")))


def digest(value: Any) -> str:
    """A short name for a nest of tensors and plain values."""
    sha = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.full_tensor() if isinstance(value, DTensor) else value  # on all ranks at the same time
            sha.update(f"{value.dtype}{list(value.shape)}".encode())
            sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                sha.update(repr(key).encode())
                feed(item)
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            sha.update(repr(value).encode())

    feed(value)
    return sha.hexdigest()[:16]
