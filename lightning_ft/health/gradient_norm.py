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
    meshes: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in meshes.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
