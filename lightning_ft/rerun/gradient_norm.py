"""The norm of all gradients, or parameters, together."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

_PIECE = 1 << 16  # elements: a quarter of a megabyte of float32
_PIECEWISE = (torch.float32, torch.float64)
_Array = np.ndarray[Any, Any]


class TotalNorm:
    """The 2-norm of several tensors, in double precision: the same, bit for bit, in whatever order they are added."""

    def __init__(self, parts: "Iterable[TotalNorm]" = ()) -> None:
        parts = list(parts)
        self._squares: list[float] = [square for part in parts for square in part._squares]
        # Those on other devices are not waited for.
        self._norms: list[Tensor] = [norm for part in parts for norm in part._norms]

    def clear(self) -> None:
        """Begin anew."""
        self._squares.clear()
        self._norms.clear()

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Take in a tensor."""
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if (array := _as_array(tensor)) is not None:
            with _silent():
                self._squares += [_square(piece) for (piece,) in _pieces(array)]
        elif tensor.device.type == "cpu":
            self._squares.append(_square_of(tensor))
        else:
            self._norms.append(norm_of(tensor))

    @torch.no_grad()
    def add_and_scale(self, tensor: Tensor, scale: float, out: Tensor) -> None:
        """Take in a tensor, and overwrite ``out`` with it, times ``scale``.

        In pieces that the processor's cache has room for: memory is read once.
        """
        source, target = _as_array(tensor), _as_array(out)
        if source is None or target is None:
            self.add(tensor)
            torch.mul(tensor, scale, out=out)
            return
        factor = source.dtype.type(scale)
        with _silent():
            for piece, scaled in _pieces(source, target):
                np.multiply(piece, factor, out=scaled)
                self._squares.append(_square(piece))

    @torch.no_grad()
    def copy_and_add(self, tensor: Tensor, out: Tensor) -> None:
        """Overwrite ``out`` with a tensor of the same kind, and take it in; in such pieces, too."""
        source, target = _as_array(tensor), _as_array(out)
        if source is None or target is None:
            self.add(out.copy_(tensor))
            return
        with _silent():
            for piece, copy in _pieces(source, target):
                np.copyto(copy, piece)
                self._squares.append(_square(copy))

    @property
    def value(self) -> Tensor | None:
        """The norm; None if nothing was added."""
        try:
            norms = [torch.tensor(math.sqrt(math.fsum(self._squares)), dtype=torch.float64)] if self._squares else []
        except OverflowError:  # of double precision
            norms = [torch.tensor(math.inf, dtype=torch.float64)]
        norms += self._norms
        return _together([norm.to(norms[-1].device) for norm in norms])


def gradient_norm(parameters: Iterable[Parameter]) -> Tensor | None:
    """Collective among the ranks that share sharded parameters. Return the 2-norm of all gradients, None without any."""
    return total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)


def total_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """Collective among the ranks that share sharded tensors. Return the 2-norm of all of them, None without any."""
    plain = TotalNorm()
    sharded: dict[object, tuple[DTensor, TotalNorm]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            key = (tensor.device_mesh, tensor.placements)
            sharded.setdefault(key, (tensor, TotalNorm()))[1].add(tensor.to_local())
        else:
            plain.add(tensor.detach())
    norms = [] if plain.value is None else [plain.value]
    for tensor, part in sharded.values():
        assert part.value is not None
        square = part.value.square()
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                dist.all_reduce(square, dist.ReduceOp.SUM, tensor.device_mesh.get_group(dimension))
        norms.append(square.sqrt())
    return _together(norms)


def norm_of(tensor: Tensor) -> Tensor:
    """Return the 2-norm of one tensor that is not sparse, in double precision."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    # On CPU sums of doubles take twenty times as long; anywhere else it is the memory that takes the time.
    # Squares of float16 overflow at a norm of 256, sums of bfloat16 stand still.
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    is_on_cpu = tensor.device.type == "cpu"
    fast = torch.float32 if is_half else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=fast if is_on_cpu else _double(tensor))
    if is_on_cpu and not norm.isfinite():  # squares of float32 overflow at a norm of 2e19, which is finite
        norm = torch.linalg.vector_norm(tensor, dtype=_double(tensor))
    return norm.double()


def _as_array(tensor: Tensor) -> _Array | None:
    """Return the memory of a tensor that is normed in pieces.

    NumPy's calls take a third of the time that torch's do, which matters in pieces that the processor's cache has room for.
    """
    if tensor.device.type != "cpu" or tensor.dtype not in _PIECEWISE or not tensor.is_contiguous() or tensor.is_neg():
        return None
    array: _Array = tensor.detach().view(-1).numpy()
    return array


def _pieces(*arrays: _Array) -> Iterator[tuple[_Array, ...]]:
    for start in range(0, arrays[0].size, _PIECE):
        yield tuple(array[start : start + _PIECE] for array in arrays)


def _silent() -> np.errstate:
    """Torch does not tell of overflows either."""
    return np.errstate(all="ignore")


def _square(piece: _Array) -> float:
    square = float(piece.dot(piece))
    return square if math.isfinite(square) else _square_of(torch.from_numpy(piece))


def _square_of(tensor: Tensor) -> float:
    norm = float(norm_of(tensor))
    return norm * norm


def _together(norms: list[Tensor]) -> Tensor | None:
    if len(norms) < 2:
        return norms[0] if norms else None
    norm: Tensor = torch.stack(norms).norm()
    return norm


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
