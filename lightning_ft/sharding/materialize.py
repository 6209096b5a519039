"""Gives tensors that were made without storage their values, module by module, so that the model is never whole."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_ft.sharding.full_state import take_shard
from lightning_ft.sharding.plan import Unit

MakeAlike = Callable[[Sequence[Tensor]], None]


def materialize(unit: Unit, device: torch.device, make_alike: MakeAlike) -> None:
    """Collective. Make the tensors of ``unit`` that are on the meta device, as each module's ``reset_parameters`` does.

    Args:
        unit: The unit; its parameters may be shards already.
        device: Where to.
        make_alike: Gives all ranks the tensors of rank 0.

    Raises:
        TypeError: If a module with such tensors has no ``reset_parameters``.

    """
    own = set(unit.parameters.values())
    for name, module in unit.module.named_modules():
        parameters = list(module.parameters(recurse=False))
        tensors = [*parameters, *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors) and own.issuperset(parameters):
            whole = _made(module, name, device)
            make_alike([*whole.parameters(recurse=False), *whole.buffers(recurse=False)])
            module.to_empty(device=device, recurse=False)
            _copy(whole, module)
    prefix = f"{unit.name}." if unit.name else ""
    made = {key: unit.module.get_parameter(key.removeprefix(prefix)) for key in unit.parameters}
    unit.parameters.update(made)


def _made(module: Module, name: str, device: torch.device) -> Module:
    """Return a module that has the tensors of ``module`` itself, whole and with their first values."""
    if not hasattr(module, "reset_parameters"):
        raise TypeError(
            f"Module {name!r} ({type(module).__name__}) was made on the meta device, but has no `reset_parameters` that"
            " gives its parameters and buffers their first values. Add one, or make the module on a real device."
        )
    whole = copy.copy(module)
    whole._parameters = {
        key: None if p is None else Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), p.requires_grad)
        for key, p in module._parameters.items()
    }
    whole._buffers = {
        key: None if buffer is None else torch.empty_like(buffer, device=device) for key, buffer in module._buffers.items()
    }
    whole.reset_parameters()  # type: ignore[operator]
    return whole


@torch.no_grad()
def _copy(whole: Module, module: Module) -> None:
    for key, value in (*whole._parameters.items(), *whole._buffers.items()):
        target = getattr(module, key)
        if value is None:
            continue
        if isinstance(target, DTensor):
            target.to_local().copy_(take_shard(value, target).to_local())
        else:
            target.copy_(value)
