"""The norm of all gradients, or parameters, together."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

_PIECE = 1 << 17  # elements: half a megabyte of float32
_DOT = (torch.float32, torch.float64)


class TotalNorm:
    """The 2-norm of several tensors, in double precision: the same, bit for bit, in whatever order they are added.

    It is the same, too, if a tensor is added piece by piece as it is copied, see :func:`in_pieces`: then the processor's
    cache has the piece, and memory is not read once more.
    """

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
        """Take in a tensor, or the next piece of it."""
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.device.type == "cpu":
            self._squares += [_square(piece) for (piece,) in in_pieces(tensor)]
        else:
            self._norms.append(norm_of(tensor))

    @property
    def value(self) -> Tensor | None:
        """The norm; None if nothing was added."""
        try:
            norms = [torch.tensor(math.sqrt(math.fsum(self._squares)), dtype=torch.float64)] if self._squares else []
        except OverflowError:  # of double precision
            norms = [torch.tensor(math.inf, dtype=torch.float64)]
        norms += self._norms
        return _together([norm.to(norms[-1].device) for norm in norms])


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the parts of tensors of one shape that the processor's cache has room for; they themselves on other devices."""
    is_large = tensors[0].numel() > _PIECE and tensors[0].device.type == "cpu"
    if is_large and all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True)
    else:
        yield tensors


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


def _square(piece: Tensor) -> float:
    if piece.dtype in _DOT and piece.is_contiguous():
        flat = piece.view(-1)
        square = float(torch.dot(flat, flat))  # takes half the time of `vector_norm` if the cache has the piece
        if math.isfinite(square):
            return square
    norm = float(norm_of(piece))
    return norm * norm


def _together(norms: list[Tensor]) -> Tensor | None:
    if len(norms) < 2:
        return norms[0] if norms else None
    norm: Tensor = torch.stack(norms).norm()
    return norm


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
