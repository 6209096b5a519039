"""Batches that are kept for a rerun: what the step may have done to them meanwhile."""

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor


def copy_structure(batch: Any) -> Any:
    """Return ``batch`` in containers of its own, with the same tensors: keys may be popped from the original."""
    return _rebuild(batch, lambda tensor: tensor)


def copy_batch(batch: Any) -> Any:
    """Return ``batch`` with tensors of its own."""
    return _rebuild(batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def versions(batch: Any) -> list[int]:
    """Return a count for each tensor of ``batch`` that grows when the tensor is changed in place."""
    # Inference tensors do not track it, and can't be changed in place by what gradients flow through.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(batch)]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Return the tensors of ``batch``, in the order of its containers."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def digest(batch: Any) -> str:
    """Return what tells ``batch`` from others: a checksum of its tensors."""
    checksum = hashlib.sha256()
    for tensor in tensors_of(batch):
        checksum.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        checksum.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def _rebuild(batch: Any, of_tensor: Any) -> Any:
    if isinstance(batch, Tensor):
        return of_tensor(batch)
    if isinstance(batch, MutableMapping):
        rebuilt = copy(batch)
        for key, value in batch.items():
            rebuilt[key] = _rebuild(value, of_tensor)
        return rebuilt
    if isinstance(batch, list):
        return [_rebuild(value, of_tensor) for value in batch]
    if isinstance(batch, tuple):
        values = [_rebuild(value, of_tensor) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
