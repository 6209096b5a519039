"""The collectives of a job, each of them one operation of the engine: retried over the survivors, never half done."""

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import INLINE_BYTES, Exchange

_WEIGHT = struct.Struct("=d")
_DTYPE_BYTES = 24
_INLINE_TENSOR_BYTES = INLINE_BYTES - _WEIGHT.size
_FOLDS: dict[Any, Any] = {
    ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    ReduceOp.PRODUCT: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


class Collectives:
    """Collectives over whoever is alive.

    Args:
        engine: Runs them.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.weight = 1.0
        """Whether this rank's values count in a mean, 1 or 0: 0 while it has no batch of its own."""
        self.counted: float | None = None
        """How many ranks' values were in the last mean."""

    def barrier(self, name: str) -> None:
        """Collective. Return once every live rank is in this barrier."""
        self._engine.run(f"barrier:{name}", lambda exchange: None)

    def all_reduce(self, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, label: str = "all_reduce") -> list[Tensor]:
        """Collective. Return the reduced tensors; the arguments are left as they are."""

        def body(exchange: Exchange) -> list[Tensor]:
            results = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            for result in results:
                exchange.all_reduce(result, op)
            return results

        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self._engine.run(label, body, size=size)

    def mean(self, tensor: Tensor) -> Tensor:
        """Collective. Return the mean over the ranks that have a batch of their own."""
        value = tensor.detach() if tensor.is_floating_point() else tensor.detach().float()
        if value.numel() * value.element_size() <= _INLINE_TENSOR_BYTES:
            weighted = value if self.weight else torch.zeros_like(value)  # not times 0: it may be NaN
            inline = _WEIGHT.pack(self.weight) + _to_bytes(weighted)
            rows: list[bytes] = self._engine.run("mean", lambda exchange: exchange.inline, size=value.numel(), inline=inline)
            total: float = sum(_WEIGHT.unpack(row[: _WEIGHT.size])[0] for row in rows)
            self.counted = total
            parts: Tensor = torch.stack([_from_bytes(row[_WEIGHT.size :], value) for row in rows])
            return parts.sum(0) / max(total, 1.0)
        weighted = value if self.weight else torch.zeros_like(value)
        weights, summed = self.all_reduce([value.new_tensor([self.weight]), weighted], label="mean")
        return summed / weights.clamp(min=1.0)

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """Collective. Return ``tensor`` reduced with ``op`` over all live ranks."""
        if op in _FOLDS and tensor.numel() * tensor.element_size() <= _INLINE_TENSOR_BYTES:
            value = tensor.detach()
            rows = self._engine.run(
                f"reduce:{op}"[:40], lambda exchange: exchange.inline, size=value.numel(), inline=_to_bytes(value)
            )
            folded: Tensor = _FOLDS[op](torch.stack([_from_bytes(row, value) for row in rows]))
            return folded
        (result,) = self.all_reduce([tensor], op, label=f"reduce:{op}"[:40])
        return result

    def count(self, decision: bool) -> tuple[int, int]:
        """Collective. Return how many live ranks say yes, and how many there are."""
        rows = self._engine.run("decision", lambda exchange: exchange.inline, inline=bytes([decision]))
        return sum(row[0] for row in rows), len(rows)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collective. Return the tensors of all live ranks, by rank; they have the same shape."""
        return self.all_gather_with_row(tensor)[1]

    def all_gather_with_row(self, tensor: Tensor) -> tuple[int, list[Tensor]]:
        """Collective. Return the tensors of all live ranks, by rank, and which of them is this rank's."""
        value = tensor.detach().contiguous()
        size = value.numel() * value.element_size()
        # Who they are is part of the result: a rank that receives it from another may have moved up since.
        members, gathered = self._engine.run(
            "all_gather", lambda exchange: (self._slots(), exchange.all_gather(value)), size=size
        )
        return members.index(self._engine.slot), gathered

    def _slots(self) -> list[int]:
        return [self._engine.slot] if self._engine.alone else list(self._engine.members)

    def all_gather_ragged(self, tensor: Tensor) -> list[Tensor]:
        """Collective. Return the tensors of all live ranks, by rank; their shapes may differ."""
        value = tensor.detach().contiguous()
        inline = struct.pack(f"={_DTYPE_BYTES}s{value.dim()}q", str(value.dtype).encode(), *value.shape)

        def body(exchange: Exchange) -> list[Tensor]:
            shapes = [struct.unpack(f"={(len(row) - _DTYPE_BYTES) // 8}q", row[_DTYPE_BYTES:]) for row in exchange.inline]
            numels = [torch.Size(shape).numel() for shape in shapes]
            dtypes = [row[:_DTYPE_BYTES].rstrip(b"\0").decode() for row in exchange.inline]
            # A rank that saw no sample has an empty state, of whatever dtype that has by default.
            told = {dtype for dtype, numel in zip(dtypes, numels, strict=True) if numel} or {dtypes[0]}
            if len(told) > 1:
                raise TypeError(f"Ranks gather tensors of different dtypes: {', '.join(dtypes)}.")
            padded = torch.zeros(max(numels), dtype=getattr(torch, told.pop().removeprefix("torch.")), device=value.device)
            padded[: value.numel()] = value.view(-1)
            gathered = exchange.all_gather(padded)
            return [flat[:numel].view(shape) for flat, numel, shape in zip(gathered, numels, shapes, strict=True)]

        return self._engine.run("all_gather_ragged", body, inline=inline)

    def broadcast_tensors(self, tensors: Sequence[Tensor], src: int = 0, label: str = "broadcast") -> list[Tensor]:
        """Collective. Return the tensors of rank ``src``; the arguments are left as they are."""

        def body(exchange: Exchange) -> list[Tensor]:
            results = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            for result in results:
                exchange.broadcast(result, src)
            return results

        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self._engine.run(label, body, size=size)

    def broadcast_bytes(self, value: bytes, src: int = 0) -> bytes:
        """Collective. Return the bytes of rank ``src``."""

        def body(exchange: Exchange) -> bytes:
            (length,) = struct.unpack("=q", exchange.inline[min(src, exchange.size - 1)])
            if exchange.rank == src and length == len(value):
                buffer = (
                    torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
                )
            else:
                buffer = torch.empty(length, dtype=torch.uint8)
            if length:
                exchange.broadcast(buffer, src)
            return buffer.numpy().tobytes()

        return self._engine.run("broadcast_bytes", body, inline=struct.pack("=q", len(value)))

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Collective. Return the object of rank ``src``, pickled as ``torch.distributed.broadcast_object_list`` does."""
        if self._engine.alone:
            return obj
        packed = pickle.dumps(obj) if self._engine.rank == src else b""
        while True:
            received = self.broadcast_bytes(packed, src)
            if received:
                return pickle.loads(received)
            packed = pickle.dumps(obj)  # the source died in it and somebody else, perhaps this rank, is `src` now


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _from_bytes(packed: bytes, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(like.dtype)
    return flat.view(like.shape).to(like.device)
