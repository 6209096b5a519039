"""The norm of all gradients together."""

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
    """The 2-norm of several gradients, in double precision: the same, bit for bit, in whatever order they are added.

    It is the same, too, if a gradient is added piece by piece as it is copied, see :func:`in_pieces`: then the processor's
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
    def add(self, gradient: Tensor) -> None:
        """Take in a gradient, or the next piece of it."""
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.device.type == "cpu":
            self._squares += [_square(piece) for (piece,) in in_pieces(gradient)]
        else:
            self._norms.append(norm_of(gradient))

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


@torch.no_grad()
def gradient_norm(parameters: Iterable[Parameter]) -> Tensor | None:
    """Collective among the ranks that share sharded parameters. Return the 2-norm of all gradients, None without any."""
    plain = TotalNorm()
    sharded: dict[object, tuple[DTensor, TotalNorm]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            key = (gradient.device_mesh, gradient.placements)
            sharded.setdefault(key, (gradient, TotalNorm()))[1].add(gradient.to_local())
        else:
            plain.add(gradient)
    norms = [] if plain.value is None else [plain.value]
    for gradient, part in sharded.values():
        assert part.value is not None
        square = part.value.square()
        for dimension, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                dist.all_reduce(square, dist.ReduceOp.SUM, gradient.device_mesh.get_group(dimension))
        norms.append(square.sqrt())
    return _together(norms)


def norm_of(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one gradient that is not sparse, in double precision."""
    if not gradient.numel():
        return gradient.new_zeros((), dtype=torch.float64)
    # On CPU sums of doubles take twenty times as long; anywhere else it is the memory that takes the time.
    # Squares of float16 overflow at a norm of 256, sums of bfloat16 stand still.
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    is_on_cpu = gradient.device.type == "cpu"
    fast = torch.float32 if is_half else None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=fast if is_on_cpu else _double(gradient))
    if is_on_cpu and not norm.isfinite():  # squares of float32 overflow at a norm of 2e19, which is finite
        norm = torch.linalg.vector_norm(gradient, dtype=_double(gradient))
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
