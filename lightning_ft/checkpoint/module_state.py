"""The state of a module and its optimizers, by names that do not depend on how the module is wrapped; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lightning_ft.checkpoint.lightning_dict import STATE_DICT, by_name, optimizer_key
from lightning_ft.checkpoint.plan import local

MayChange = Callable[[str, Tensor], bool]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Levels of names that `torch.compile` and activation checkpointing add."""


def unwrapped(module: Module) -> Module:
    """Return what a module wraps whole: under DistributedDataParallel, `torch.compile`, Fabric's `setup`."""
    while True:
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            module = module.module
            continue
        inner = next((module._modules[name] for name in ("_orig_mod", "_forward_module") if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def canonical(name: str) -> str:
    """Return the name that a parameter or buffer has without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def state_of(module: Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return what is saved of a module and its optimizers, as :func:`lightning_dict.split` lays it out.

    Raises:
        ValueError: If an optimizer has a parameter that the module has not.

    """
    state: dict[str, Any] = {STATE_DICT: {canonical(name): value for name, value in unwrapped(module).state_dict().items()}}
    for index, optimizer in enumerate(optimizers):
        names = [name for group in group_names(module, optimizer) for name in group]
        state[optimizer_key(index)] = by_name(optimizer.state_dict(), names)
    return state


def group_names(module: Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, for each of its groups.

    Raises:
        ValueError: If one of them is not a parameter of the module.

    """
    known = {id(parameter): canonical(name) for name, parameter in unwrapped(module).named_parameters()}
    groups = [[known.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise ValueError(f"{type(optimizer).__name__} has a parameter that is none of the module's: it has no name to save.")
    return [[name for name in group if name is not None] for group in groups]


def parameters_by_name(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module by the names under which their optimizer's state is saved."""
    for name, parameter in unwrapped(module).named_parameters():
        yield canonical(name), parameter


def changing(module: Module) -> MayChange:
    """Return which tensors may change before the next optimizer step: all but parameters and optimizers' states.

    Options of an optimizer may: a scheduler changes a learning rate that is a tensor.
    """
    still = {_memory(parameter) for parameter in module.parameters()}

    def may_change(name: str, tensor: Tensor) -> bool:
        of_optimizer = name.startswith("optimizer_") and ".param_groups." not in name
        return not (of_optimizer or _memory(tensor) in still)

    return may_change


def as_sequence(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """Return the optimizers that an argument stands for."""
    return () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def _memory(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
