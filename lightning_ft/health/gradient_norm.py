"""The norm of the gradient that an optimizer is about to apply."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@torch.no_grad()
def gradient_norm(optimizer: Optimizer) -> Tensor | None:
    """Collective in the replica, if parameters are sharded. Return the norm of all gradients; None if there are none."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not gradients:
        return None
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
