"""What is saved of a Trainer: Lightning's checkpoint, taken apart so that tensors can be copied while training goes on."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_ft.checkpoint.layout import META, Manifest, rank_section_name
from lightning_ft.checkpoint.lightning_dict import split
from lightning_ft.checkpoint.module_state import MayChange, changing
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.checkpoint.rank_section import section_bytes
from lightning_ft.errors import UnsupportedStateError
from lightning_ft.trainer.event_log import refer

log = logging.getLogger(__name__)


def content_of(trainer: Trainer, checkpoint: dict[str, Any], run_id: str) -> tuple[Content, MayChange]:
    """Return what to save, and which of its tensors may change before the next optimizer step.

    Args:
        trainer: Whose state it is.
        checkpoint: What it dumped.
        run_id: Of the run.

    """
    refer(trainer, checkpoint)
    module = trainer.lightning_module
    names = [
        parameter_names(module, optimizer, state)
        for optimizer, state in zip(trainer.optimizers, checkpoint.get("optimizer_states", ()), strict=False)
    ]
    tensors, meta = split(checkpoint, names)
    engine: Any = getattr(trainer.strategy, "engine", None)
    slot = getattr(engine, "slot", trainer.global_rank)

    def files(seat: Seat) -> dict[str, bytes]:
        section = {"rank": seat.rank, "slot": slot, "world_size": seat.world_size, "state": own_state(checkpoint)}
        named = {rank_section_name(seat.rank): section_bytes(section)}
        return {META: _pickled(meta), **named} if seat.rank == 0 else named

    manifest = Manifest(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        run_id=run_id,
        world_size=1,
        shard_size=getattr(getattr(engine, "replica", None), "size", 1),
        files=(),
        parent=None if trainer.ckpt_path is None else str(trainer.ckpt_path),
    )
    return Content(tensors, files, manifest), changing(module)


def parameter_names(module: LightningModule, optimizer: Optimizer, state: dict[str, Any]) -> list[str] | None:
    """Return the names of an optimizer's parameters; None if its state has names already, or one of them has none."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(isinstance(key, str) for group in state.get("param_groups", ()) for key in group["params"]):
        return None
    names = [known.get(id(parameter)) for parameter in parameters]
    return None if None in names else [name for name in names if name is not None]


def own_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what other ranks do not have alike: random numbers and positions in the data."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    state: dict[str, Any] = {"random": _collect_rng_states(include_cuda=False)}
    loaders: Sequence[Any] = fit_loop.get("state_dict", {}).get("combined_loader") or ()
    if loaders:
        try:
            section_bytes({"loaders": list(loaders)})
            state["loaders"] = list(loaders)
        except UnsupportedStateError as error:
            log.debug("The position of this rank's loaders is not saved: %s", error)
    return state


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
