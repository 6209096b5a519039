"""Gives parameters that were made without storage their values, unit by unit, so that the model is never whole."""

import torch
from torch.nn import Module

from lightning_ft.sharding.plan import Unit


def materialize(unit: Unit, device: torch.device) -> None:
    """Make the tensors of ``unit`` that are on the meta device, as each module's ``reset_parameters`` does.

    Raises:
        TypeError: If a module with such tensors has no ``reset_parameters``.

    """
    own = set(unit.parameters.values())
    for name, module in unit.module.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        if any(tensor.is_meta and tensor not in own for tensor in module.parameters(recurse=False)):
            continue  # of a unit inside, which is sharded already or will be
        module.to_empty(device=device, recurse=False)
        _reset(module, name)
    unit.parameters.update({key: unit_parameter(unit, key) for key in unit.parameters})


def unit_parameter(unit: Unit, name: str) -> torch.nn.Parameter:
    """Return the parameter that ``unit`` has under this name now."""
    return unit.module.get_parameter(name.removeprefix(f"{unit.name}.") if unit.name else name)


def _reset(module: Module, name: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise TypeError(
            f"Module {name!r} ({type(module).__name__}) was made on the meta device, but has no `reset_parameters` that"
            " gives its parameters and buffers their first values. Add one, or make the module on a real device."
        )
    reset()
