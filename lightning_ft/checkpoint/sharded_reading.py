"""Reads a checkpoint into a module and its optimizers as they are sharded now; each rank reads its part by itself."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from lightning_ft.checkpoint.dcp_reading import read_flat, read_metadata, unflatten
from lightning_ft.checkpoint.lightning_dict import optimizer_key, state_dict_of
from lightning_ft.errors import MalformedStateError

_Path = tuple[str | int, ...]


def load_sharded(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> None:
    """Load a checkpoint that any number of ranks saved, sharded in any way or not at all.

    Nothing is changed before it is known that everything fits, and weights only once they have been read.

    Args:
        module: Its parameters are DTensors or plain tensors.
        optimizer: Of the module's parameters; several in the order in which they were saved; None loads weights only.
        path: The checkpoint; verify it first.
        strict: Whether the checkpoint must have exactly the names that the module has.
        weights_only: For what is not a tensor, as in ``torch.load``.

    Raises:
        MalformedStateError: If it does not fit.

    """
    where = Path(path)
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else optimizer
    metadata = read_metadata(where)
    paths = {tuple((metadata.planner_data or {}).get(key, (key,))): key for key in metadata.state_dict_metadata}
    root = next((path[0] for path in paths if path[0] in ("state_dict", "model")), "state_dict")
    state = get_model_state_dict(module)
    _check_names({name for head, name, *_ in (path for path in paths if len(path) > 1) if head == root}, state, strict)
    into: dict[_Path, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and (root, name) in paths:
            _check_shape(metadata, paths[root, name], name, value)
            into[root, name] = torch.empty_like(value)
    for index in range(len(optimizers)):
        if not any(path[0] == optimizer_key(index) for path in paths):
            raise MalformedStateError(f"checkpoint {where} has no state of optimizer {index}")

    values = read_flat(where, weights_only=weights_only, wanted=lambda path: path[0] == root, into=into)
    module.load_state_dict(state_dict_of(unflatten(values)), strict=strict)
    for index, optimizer in enumerate(optimizers):
        _load_optimizer(where, module, optimizer, optimizer_key(index), weights_only)


def _load_optimizer(directory: Path, module: Module, optimizer: Optimizer, key: str, weights_only: bool | None) -> None:
    state = get_optimizer_state_dict(module, optimizer)
    into = {path: value for path, value in _flatten(state, (key,)) if isinstance(value, Tensor)}
    values = read_flat(directory, weights_only=weights_only, wanted=lambda path: path[0] == key, into=into)
    loaded = unflatten(values)[key]
    loaded.setdefault("state", {})  # of an optimizer without any
    set_optimizer_state_dict(module, optimizer, loaded)


def _flatten(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flatten(part, (*path, str(key)))
    else:
        yield path, value


def _check_names(saved: set[Any], state: Mapping[str, Any], strict: bool) -> None:
    missing, unexpected = sorted(state.keys() - saved), sorted(saved - state.keys())
    if strict and (missing or unexpected):
        raise MalformedStateError(f"the checkpoint lacks {missing} and has {unexpected}, of which the module has none")


def _check_shape(metadata: Metadata, key: str, name: str, value: Tensor) -> None:
    described = metadata.state_dict_metadata[key]
    if not isinstance(described, TensorStorageMetadata) or tuple(described.size) != tuple(value.shape):
        saved = tuple(described.size) if isinstance(described, TensorStorageMetadata) else "no tensor"
        raise MalformedStateError(f"{name} is {saved} in the checkpoint and {tuple(value.shape)} in the module")
