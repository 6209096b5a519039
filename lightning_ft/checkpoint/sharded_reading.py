"""Reads a checkpoint for a module and its optimizers as they are sharded now; each rank reads its part by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_ft.checkpoint.dcp_reading import read_flat, read_metadata, unflatten
from lightning_ft.checkpoint.lightning_dict import optimizer_key, state_dict_of
from lightning_ft.checkpoint.module_state import canonical, group_names, parameters_by_name, unwrapped
from lightning_ft.checkpoint.store_path import Place
from lightning_ft.errors import MalformedStateError

_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ReadState:
    """What was read, and fits.

    Args:
        module: For this one.
        weights: Its state.
        strict: Whether they must have the same names.
        optimizers: Each with its state.

    """

    module: Module
    weights: dict[str, Any]
    strict: bool
    optimizers: tuple[tuple[Optimizer, dict[str, Any]], ...]

    def apply(self) -> None:
        """Put it in place of what is there."""
        self.module.load_state_dict(self.weights, strict=self.strict)
        for optimizer, state in self.optimizers:
            optimizer.load_state_dict(state)


def read_state(
    module: Module, optimizers: Sequence[Optimizer], path: Place, *, strict: bool = True, weights_only: bool | None = None
) -> ReadState:
    """Read a checkpoint that any number of ranks saved, sharded in any way or not at all; change nothing.

    Args:
        module: Its parameters are DTensors or plain tensors.
        optimizers: Of the module's parameters, in the order in which they were saved.
        path: The checkpoint; verify it first.
        strict: Whether the checkpoint must have exactly the names that the module has.
        weights_only: For what is not a tensor, as in ``torch.load``.

    Raises:
        MalformedStateError: If it does not fit.

    """
    module = unwrapped(module)
    source = _Source(path, weights_only)
    for index in range(len(optimizers)):
        if not any(source.paths(optimizer_key(index))):
            raise MalformedStateError(f"checkpoint {path} has no state of optimizer {index}")
    weights = _read_weights(source, module, strict)
    read = [(optimizer, _read_optimizer(source, module, optimizer, index)) for index, optimizer in enumerate(optimizers)]
    return ReadState(module, weights, strict, tuple(read))


class _Source:
    """A checkpoint that is read.

    Args:
        directory: Where it is.
        weights_only: For what is not a tensor.

    """

    def __init__(self, directory: Place, weights_only: bool | None) -> None:
        self.directory = directory
        self._weights_only = weights_only
        metadata = read_metadata(directory)
        self._described = metadata.state_dict_metadata
        self._keys = _keys(metadata)

    def paths(self, *prefix: str | int) -> Iterator[_Path]:
        """Yield all paths that begin so."""
        return (path for path in self._keys if path[: len(prefix)] == prefix)

    def tensor(self, path: _Path) -> TensorStorageMetadata | None:
        """Return what is known about a tensor; None if there is none at this path."""
        described = self._described.get(self._keys.get(path, ""))
        return described if isinstance(described, TensorStorageMetadata) else None

    def read(self, *prefix: str | int, into: Mapping[_Path, Tensor] = {}) -> dict[_Path, Any]:
        """Return all that lies below ``prefix``."""
        return read_flat(
            self.directory, weights_only=self._weights_only, wanted=lambda path: path[: len(prefix)] == prefix, into=into
        )


def _keys(metadata: Metadata) -> dict[_Path, str]:
    return {tuple((metadata.planner_data or {}).get(key, (key,))): key for key in metadata.state_dict_metadata}


def _read_weights(source: _Source, module: Module, strict: bool) -> dict[str, Any]:
    root = next((path[0] for path in source.paths() if path[0] in ("state_dict", "model")), "state_dict")
    live = module.state_dict()
    names = {canonical(name): name for name in live}
    saved = {str(path[1]) for path in source.paths(root) if len(path) > 1}
    missing, unexpected = sorted(names.keys() - saved), sorted(saved - names.keys())
    if strict and (missing or unexpected):
        raise MalformedStateError(f"the checkpoint lacks {missing} and has {unexpected}, of which the module has none")
    into: dict[_Path, Tensor] = {}
    for short, name in names.items():
        if isinstance(live[name], Tensor) and short in saved:
            _check_shape(source.tensor((root, short)), short, live[name])
            into[root, short] = torch.empty_like(live[name])
    values = state_dict_of(unflatten(source.read(root, into=into)))
    return {names.get(short, short): value for short, value in values.items()}


def _check_shape(described: TensorStorageMetadata | None, name: str, value: Tensor) -> None:
    saved = "no tensor" if described is None else tuple(described.size)
    if saved != tuple(value.shape):
        raise MalformedStateError(f"{name} is {saved} in the checkpoint and {tuple(value.shape)} in the module")


def _read_optimizer(source: _Source, module: Module, optimizer: Optimizer, index: int) -> dict[str, Any]:
    key = optimizer_key(index)
    names = group_names(module, optimizer)
    groups = unflatten(source.read(key, "param_groups")).get(key, {}).get("param_groups", [])
    _check_groups(groups, names, index)
    parameters = dict(parameters_by_name(module))
    into = {}
    for path in source.paths(key, "state"):
        place = _place(source, path, parameters.get(str(path[2])), optimizer) if len(path) == 4 else None
        if place is not None:
            into[path] = place
    state = unflatten(source.read(key, "state", into=into)).get(key, {}).get("state", {})
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    numbered = [{**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)]
    return {"state": {numbers[name]: state[name] for name in numbers if name in state}, "param_groups": numbered}


def _check_groups(saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], index: int) -> None:
    told = [sorted(map(str, group["params"])) for group in saved]
    if told != [sorted(group) for group in names]:
        raise MalformedStateError(
            f"the groups of optimizer {index} have the parameters {_shortened(names)}, and in the checkpoint they have"
            f" {_shortened(told)}"
        )


def _shortened(groups: Sequence[Sequence[str]]) -> str:
    texts = (", ".join([*group[:3], *(["..."] if len(group) > 3 else [])]) for group in groups)
    return "; ".join(f"({text})" for text in texts)


def _place(source: _Source, path: _Path, parameter: Tensor | None, optimizer: Optimizer) -> Tensor | None:
    """Return what to read an optimizer's tensor into: something that is laid out as the parameter is; None: all."""
    described = source.tensor(path)
    if described is None or not isinstance(parameter, DTensor):
        return None
    live = optimizer.state.get(parameter, {}).get(path[3])
    like = live if isinstance(live, DTensor) and live.shape == described.size else parameter.detach()
    if like.shape == described.size:
        return torch.empty_like(like, dtype=described.properties.dtype)
    if described.size.numel() > 1:
        raise MalformedStateError(
            f"{path[3]} of the sharded parameter {path[2]} is {tuple(described.size)}, and it is not known how to divide"
            " that; take one optimizer step before loading"
        )
    return None
