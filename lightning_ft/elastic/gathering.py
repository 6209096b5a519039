"""A gather that gradients flow through, forward and backward each one operation of the engine."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_ft.elastic.collectives import Collectives


def gather_with_gradients(tensor: Tensor, collectives: Collectives) -> Tensor:
    """Collective, and again in backward. Return the tensors of all live ranks, stacked by rank.

    Backward adds up what the losses of all ranks say of this rank's tensor. If a rank dies in between, what it gave stays in
    the gathered tensor and what its loss would have said is left out, as its gradients are.
    """
    gathered: Tensor = _Gather.apply(tensor, collectives)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        ctx.row, gathered = collectives.all_gather_with_row(tensor)
        return torch.stack(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (summed,) = ctx.collectives.all_reduce([gradient], label="backward of all_gather")
        return summed[ctx.row], None
