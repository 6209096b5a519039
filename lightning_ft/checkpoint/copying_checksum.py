"""The checksum of a file taken while values are copied into it: a copy that is in the cache costs little to read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_PIECE_BYTES = 512 << 10
"""Of a tensor that are copied at a time: twice as much is to fit into a core's own cache."""


class CopyingChecksum:
    """The checksum of an :class:`Image`'s file of tensors.

    Args:
        body: The part of the file that tensors are copied to, one after the other.
        tail: What follows it.

    """

    def __init__(self, body: memoryview, tail: bytes) -> None:
        self._body = body
        self._tail = tail
        self._begin = torch.frombuffer(body, dtype=torch.uint8).data_ptr() if body else 0
        self._done = 0
        self._checksum = xxhash.xxh3_64()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to destinations in the order of their places; what is between them must be there already."""
        for destination, source in pairs:
            for piece, values in zip(_pieces(destination, source), _pieces(source, source), strict=True):
                piece.copy_(values)
                if piece.numel():  # else it has no place
                    self._take(piece.data_ptr() - self._begin + piece.nbytes)

    def finish(self) -> str:
        """Return the checksum of the whole file."""
        self._take(len(self._body))
        self._checksum.update(self._tail)
        return self._checksum.hexdigest()

    def _take(self, end: int) -> None:
        self._checksum.update(self._body[self._done : end])
        self._done = end


def _pieces(tensor: Tensor, source: Tensor) -> tuple[Tensor, ...]:
    if source.nbytes <= _PIECE_BYTES or not source.is_contiguous():
        return (tensor,)
    pieces: tuple[Tensor, ...] = tensor.view(-1).split(_PIECE_BYTES // source.itemsize)
    return pieces
