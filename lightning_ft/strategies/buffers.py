"""When the buffers of rank 0 (BatchNorm's running statistics) go to the other ranks: exactly when ``ddp`` does it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_ft.elastic.collectives import Collectives


class BufferSync:
    """Gives all ranks the buffers of rank 0 before a forward pass.

    ``DistributedDataParallel`` does so before each forward that follows one with gradients and gradient synchronization.

    Args:
        module: Whose buffers.
        collectives: Sends them.

    """

    def __init__(self, module: Module, collectives: Collectives) -> None:
        self._module = module
        self._collectives = collectives
        self.due = True
        """Whether the next forward pass sends them; must be the same on all ranks."""

    @property
    def sends_next(self) -> bool:
        """Whether the next forward pass begins with a message."""
        return self.due and bool(self._buffers)

    def before_forward(self, *, synchronize_gradients: bool) -> None:
        """Collective. To be called before every forward pass of the module.

        Args:
            synchronize_gradients: Whether gradients of this pass will be reduced.

        """
        buffers = self._buffers
        if self.due and buffers:
            for buffer, value in zip(buffers, self._collectives.broadcast_tensors(buffers, label="buffers"), strict=True):
                buffer.detach().copy_(value)
        self.due = torch.is_grad_enabled() and synchronize_gradients

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer for buffer in self._module.buffers() if not isinstance(buffer, DTensor)]
