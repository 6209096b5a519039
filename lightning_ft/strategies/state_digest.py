"""A digest of what ranks must hold alike: parameters and the state of their optimizers."""

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_MAX_BYTES = 1 << 26


def state_digest(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> str:
    """Return a digest of this rank's share of the state; the same on two ranks if they hold the same, bit for bit.

    Of a state larger than 64 MiB, every k-th number counts, so that it takes no longer.

    Args:
        parameters: Of the module.
        optimizers: Whose state counts, too.

    """
    tensors = [_local(tensor) for tensor in (*parameters, *_states(optimizers))]
    stride = max(1, -(-sum(tensor.nbytes for tensor in tensors) // _MAX_BYTES))
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        flat = (flat[::stride] if len(flat) > stride else flat).cpu().contiguous()
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
