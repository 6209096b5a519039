"""What training changes in a module and its optimizers besides their values: a joiner makes them anew, as they began."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

_FLAGS = ("training", "track_running_stats", "momentum")


def describe_flags(pl_module: LightningModule) -> dict[str, Any]:
    """Return which parameters are frozen and in which mode each submodule is."""
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in pl_module.named_parameters()},
        "modules": {name: _flags(module) for name, module in pl_module.named_modules()},
    }


def adopt_flags(pl_module: LightningModule, flags: dict[str, Any]) -> None:
    """Freeze, unfreeze and switch as :func:`describe_flags` said on another rank."""
    for name, parameter in pl_module.named_parameters():
        if name in flags["requires_grad"]:
            parameter.requires_grad_(flags["requires_grad"][name])
    for name, module in pl_module.named_modules():
        for flag, value in flags["modules"].get(name, {}).items():
            setattr(module, flag, value)


def _flags(module: Module) -> dict[str, Any]:
    plain = (bool, int, float, type(None))
    return {flag: vars(module)[flag] for flag in _FLAGS if isinstance(vars(module).get(flag, module), plain)}


def describe_shapes(pl_module: LightningModule) -> dict[str, list[int]]:
    """Return the shape of each buffer: that of a queue of samples grows."""
    return {name: list(buffer.shape) for name, buffer in pl_module.named_buffers() if not is_lazy(buffer)}


def adopt_shapes(pl_module: LightningModule, shapes: dict[str, list[int]]) -> None:
    """Give buffers the shapes that :func:`describe_shapes` returned on another rank, before their values are loaded."""
    for name, buffer in list(pl_module.named_buffers()):
        shape = shapes.get(name)
        if shape is not None and not is_lazy(buffer) and list(buffer.shape) != shape:
            owner, _, own_name = name.rpartition(".")
            setattr(pl_module.get_submodule(owner), own_name, buffer.new_zeros(shape))


def describe_groups(pl_module: LightningModule, optimizers: list[Optimizer]) -> list[Any]:
    """Return the names of the parameters in each group of each optimizer; None for one that has others than the module's."""
    names = {parameter: name for name, parameter in pl_module.named_parameters()}
    described: list[Any] = []
    for optimizer in optimizers:
        groups = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        described.append(None if any(None in group for group in groups) else groups)
    return described


@contextmanager
def grouped_as(groups: list[list[dict[str, Any]]], optimizers: list[Optimizer]) -> Iterator[None]:
    """Give optimizers these groups for a while."""
    adopted = [optimizer.param_groups for optimizer in optimizers]
    for optimizer, own in zip(optimizers, groups, strict=True):
        optimizer.param_groups = own
    try:
        yield
    finally:
        for optimizer, later in zip(optimizers, adopted, strict=True):
            optimizer.param_groups = later


def adopt_groups(pl_module: LightningModule, optimizers: list[Optimizer], described: list[Any]) -> None:
    """Group parameters as :func:`describe_groups` said on another rank; the groups' options come with their state."""
    parameters = dict(pl_module.named_parameters())
    for optimizer, mine, groups in zip(optimizers, describe_groups(pl_module, optimizers), described, strict=True):
        if groups is None or groups == mine:
            continue
        options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        optimizer.param_groups = [{**options, "params": [parameters[name] for name in group]} for group in groups]
