"""The norm of all gradients together."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


@torch.no_grad()
def gradient_norm(parameters: Iterable[Parameter]) -> Tensor | None:
    """Collective among the ranks that share sharded parameters. Return the 2-norm of all gradients, None without any."""
    plain: list[Tensor] = []
    sharded: dict[object, tuple[DTensor, list[Tensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            key = (gradient.device_mesh, gradient.placements)
            sharded.setdefault(key, (gradient, []))[1].append(norm_of(gradient.to_local()))
        else:
            plain.append(norm_of(gradient))
    squares = [torch.stack(plain).square().sum()] if plain else []
    for gradient, norms in sharded.values():
        square = torch.stack(norms).square().sum()
        for dimension, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                dist.all_reduce(square, dist.ReduceOp.SUM, gradient.device_mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else None


def norm_of(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one gradient, in double precision."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if not gradient.numel():
        return gradient.new_zeros((), dtype=torch.float64)
    # On CPU sums of doubles take twenty times as long; anywhere else it is the memory that takes the time.
    # Squares of float16 overflow at a norm of 256, sums of bfloat16 stand still.
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    is_on_cpu = gradient.device.type == "cpu"
    fast = torch.float32 if is_half else None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=fast if is_on_cpu else _double(gradient))
    if is_on_cpu and not norm.isfinite():  # squares of float32 overflow at a norm of 2e19, which is finite
        norm = torch.linalg.vector_norm(gradient, dtype=_double(gradient))
    return norm.double()


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
