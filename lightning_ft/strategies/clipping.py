"""Clips gradients by their norm where some of them are sharded over other ranks than others, which torch refuses."""

from collections.abc import Iterable

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ft.rerun.gradient_norm import gradient_norm
from lightning_ft.strategies.buckets import local_part

_LEAST = 1e-6  # as torch has it


def clip_shards_with(precision: Precision) -> None:
    """Have ``precision`` clip by the norm of all gradients, whatever ranks they are sharded over."""

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_norm(precision.main_params(optimizer), clip_val)

    precision.clip_grad_by_norm = clip  # type: ignore[method-assign]


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Parameter], largest: float) -> None:
    """Collective in the replica. Scale all gradients so that their norm together is at most ``largest``."""
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if norm is None:
        return
    factor = (largest / (norm + _LEAST)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(factor.to(local.device, local.dtype))
