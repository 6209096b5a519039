"""Notices computation with a shard where the whole parameter was meant.

Some of it torch refuses, since shards and plain tensors don't mix. Some it computes, with a result that looks like a loss
and is none: a penalty on the weights of a unit that is not gathered.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ft.sharding.mesh import DIMENSION


class ShardUsed(BaseException):
    """An operation got a shard; not an ``Exception``, which user code might handle.

    Args:
        operation: Its name.

    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        super().__init__(operation)


class ShardWatch(TorchDispatchMode):
    """While this is entered, an operation with a shard raises :class:`ShardUsed`.

    Args:
        only_with_gradients: Leave those alone that are not for a backward pass: what optimizers do.

    """

    def __init__(self, *, only_with_gradients: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only_with_gradients = only_with_gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        watched = torch.is_grad_enabled() or not self._only_with_gradients
        if watched and _has_shard((*args, *kwargs.values())):
            raise ShardUsed(str(func))
        return func(*args, **kwargs)


def _has_shard(values: Iterable[Any]) -> bool:
    return any(_is_shard(v) or (isinstance(v, list | tuple) and _has_shard(v)) for v in values)


def _is_shard(value: Any) -> bool:
    """Whether it is sharded over ranks that have batches of their own; those that share one compute with what they have."""
    return isinstance(value, DTensor) and DIMENSION in (value.device_mesh.mesh_dim_names or (DIMENSION,))
