"""Tensors as bytes, and tensors found in nested values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def tensors_in(nest: Any, index: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of dictionaries, sequences and dataclasses with their places, such as ``[0][mask]``."""
    if isinstance(nest, Tensor):
        yield index, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from tensors_in(value, f"{index}[{key}]")
    elif isinstance(nest, list | tuple):
        for position, value in enumerate(nest):
            yield from tensors_in(value, f"{index}[{position}]")
    elif is_dataclass(nest) and not isinstance(nest, type):
        for entry in fields(nest):
            yield from tensors_in(getattr(nest, entry.name), f"{index}[{entry.name}]")


def whole(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as one that has its values in memory, in order. Collective in its mesh if it is sharded.

    Raises:
        TypeError: If there is nothing to be written of it.

    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise TypeError(f"a {'meta' if tensor.is_meta else 'quantized' if tensor.is_quantized else 'nested'} tensor")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def num_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return how many bytes ``tensor`` takes as ``dtype``."""
    return tensor.numel() * dtype.itemsize


def pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield parts of ``tensor`` of at most ``limit`` elements each, in the order of its values."""
    if tensor.numel() <= max(limit, 1):
        yield tensor
        return
    rows = max(1, limit // (tensor.numel() // len(tensor)))
    for part in tensor.split(rows):
        yield from pieces(part[0] if len(part) == 1 else part, limit)


def copied(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """Return the values of ``tensor`` as ``dtype``, copied to memory of their own."""
    made = tensor.to(device="cpu", dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    values: Any = made.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def from_bytes(data: bytes, dtype: str, shape: list[int]) -> Tensor:
    """Return the tensor that was written as ``data``."""
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without the module."""
    return str(dtype).removeprefix("torch.")
