"""Between shards and full tensors: what is saved is whole, and whoever loads something whole takes its own shard."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.optim import Optimizer

_HOOKED = "_lightning_ft_takes_full_state"


def gather_full(nest: Any, *, keep: bool = True) -> Any:
    """Collective in the replica. Return ``nest`` with all shards in it made whole, in host memory.

    Args:
        nest: Dictionaries, lists and tuples in any depth, in the same order on all ranks of the replica.
        keep: Whether this rank wants the result; otherwise shards become None.

    """
    if isinstance(nest, DTensor):
        with torch.no_grad():
            whole = nest.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(nest, dict):
        gathered = {key: gather_full(value, keep=keep) for key, value in nest.items()}
        if type(nest) is dict:
            return gathered
        same = nest.copy()  # of its class, with its other attributes: a module's `state_dict` has metadata
        same.update(gathered)
        return same
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(gather_full(value, keep=keep) for value in nest))
    if type(nest) in (list, tuple):
        return type(nest)(gather_full(value, keep=keep) for value in nest)
    return nest


def take_shard(value: Any, like: Tensor) -> Any:
    """Return the part of ``value`` that this rank holds if ``like`` is a shard of a tensor of this shape."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value
    # Each rank has it whole: nothing needs to be sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def accept_full_state(module: Module) -> None:
    """Let ``load_state_dict`` of a sharded module, and of each module in it, take full tensors. May be called again."""
    _accept(module, owner=module)


def accept_full_optimizer_state(optimizer: Optimizer) -> None:
    """Let ``load_state_dict`` of an optimizer of sharded parameters take full tensors."""
    optimizer.register_load_state_dict_pre_hook(_shard_states)


def _accept(module: Module, owner: Module) -> None:
    owner = module if isinstance(module, FSDPModule) else owner
    if module._parameters and not getattr(module, _HOOKED, False):
        module.register_load_state_dict_pre_hook(partial(_shard_parameters, owner))
        setattr(module, _HOOKED, True)
    for child in module.children():
        _accept(child, owner)


def _shard_parameters(owner: Module, module: Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    if not any(prefix + name in state_dict for name in module._parameters):
        return
    if isinstance(owner, FSDPModule):
        owner.reshard()  # else these are the gathered parameters
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state_dict:
            state_dict[prefix + name] = take_shard(state_dict[prefix + name], parameter)


def _shard_states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[Any, Tensor] = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        parameters.update(zip(saved["params"], group["params"], strict=False))
    state = {
        key: {name: take_shard(value, parameters[key]) for name, value in values.items()}
        if key in parameters and isinstance(values, Mapping)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def num_local_bytes(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes of ``tensors`` lie on this rank."""
    with torch.no_grad():
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)
