"""Lets Lightning's ``grad_norm`` see the norms of whole gradients where these are sharded."""

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grads
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_ft.strategies.buckets import local_part


def understand_shards() -> None:
    """Change what ``grad_norm`` does for sharded modules, also where it is imported by name already. May be called again."""
    grads.grad_norm.__code__ = _call_in_its_place.__code__


def _call_in_its_place(module: Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    from lightning_ft.strategies.gradient_norms import whole_grad_norm

    return whole_grad_norm(module, norm_type, group_separator)


def whole_grad_norm(module: Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    """Collective in the replica. Return the norm of each gradient of ``module`` and their total norm.

    Args:
        module: The module.
        norm_type: Order of the norm; ``"inf"`` for the largest element.
        group_separator: Stands between the names of the norms and of the parameters.

    Raises:
        ValueError: If the order is not positive.

    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`grad_norm(norm_type={norm_type!r})` is not valid: expected a positive number or 'inf'.")
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    names = dict(zip(gradients, _norms(list(gradients.values()), order), strict=True))
    norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in names.items()}
    if norms:
        total = torch.stack(list(norms.values())).norm(order)
        norms[f"grad_{order}_norm_total"] = total
    return norms


@torch.no_grad()
def _norms(gradients: list[Tensor], order: float) -> list[Tensor]:
    """Collective in the replica. All parts of one kind of shards travel in one message."""
    norms = [local.norm(order) if (local := local_part(g)).numel() else local.new_zeros(()) for g in gradients]
    alike: dict[object, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, DTensor):
            divided = tuple(not placement.is_replicate() for placement in gradient.placements)
            alike.setdefault((gradient.device_mesh, divided), []).append(index)
    for indices in alike.values():
        parts = torch.stack([norms[index].float() for index in indices])
        gradient = gradients[indices[0]]
        assert isinstance(gradient, DTensor)
        if not math.isinf(order):
            parts.pow_(order)
        op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
        for dimension, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                dist.all_reduce(parts, op, gradient.device_mesh.get_group(dimension))
        if not math.isinf(order):
            parts.pow_(1.0 / order)
        for index, norm in zip(indices, parts, strict=True):
            norms[index] = norm.to(norms[index].dtype)
    return norms
