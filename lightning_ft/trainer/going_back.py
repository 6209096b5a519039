"""Takes the weights of a running fit back to a checkpoint; the training goes on with the batches that come next."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.reader import DefaultGroup, candidates, check
from lightning_ft.checkpoint.store_path import place
from lightning_ft.errors import DamagedCheckpointError
from lightning_ft.trainer.local_copy import readable


def newest_until(trainer: Trainer, step: int) -> tuple[str, int] | None:
    """Collective. Return the newest intact checkpoint of a step, at most ``step``, and its step; None if there is none."""
    for callback in trainer.checkpoint_callbacks:
        getattr(callback, "finish_saves", lambda: None)()
    ranks = DefaultGroup()
    for path, saved_at in ranks.broadcast(_saved_until(trainer, step) if ranks.rank == 0 else []):
        try:
            check(path, ranks)
        except DamagedCheckpointError:
            continue
        return path, saved_at
    return None


def go_back(trainer: Trainer, path: str) -> None:
    """Collective. Load weights and optimizer state from ``path``, nothing else: learning rates, loops and loaders go on."""
    for callback in trainer.checkpoint_callbacks:
        getattr(callback, "wait_for_copy", lambda: None)()
    options = [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    if trainer.strategy.lightning_restore_optimizer:
        _restore(trainer, path)
    else:  # such a strategy loads them itself, shard by shard, whatever it returns
        with readable(trainer, path) as where:
            trainer.strategy.load_checkpoint(where, weights_only=False)
    for optimizer, groups in zip(trainer.optimizers, options, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)


def _restore(trainer: Trainer, path: str) -> None:
    is_directory = place(path).is_dir()
    checkpoint = read_checkpoint(path, False) if is_directory else trainer.strategy.load_checkpoint(path, weights_only=False)
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    try:
        connector.restore_model()
        connector.restore_optimizers()
    finally:
        connector._loaded_checkpoint = {}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _saved_until(trainer: Trainer, step: int) -> Sequence[tuple[str, int]]:
    """Return checkpoints and their steps, the newest first; called by one rank."""
    directories = {
        os.fspath(path) for c in trainer.checkpoint_callbacks if (path := getattr(c, "dirpath", None)) is not None
    }
    found = []
    for directory in directories:
        for candidate in candidates(directory):
            saved_at = candidate.step if candidate.step >= 0 else _step_in(candidate.path)
            if saved_at is not None and saved_at <= step:
                found.append((candidate.path, saved_at))
    return sorted(found, key=lambda pair: -pair[1])


def _step_in(path: str) -> int | None:
    try:
        return int(torch.load(path, map_location="cpu", weights_only=False, mmap=True)["global_step"])
    except Exception:  # whatever is wrong with it: it is not one to go back to
        return None
