"""Nested state whose sharded tensors are taken apart by one set of ranks and put together by another.

A piece is a plain dict, so that what holds it can be stored and sent as any other state. Whoever has the pieces of all
ranks can put together its own part on any mesh: no message is needed for that.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ft.errors import UnsupportedStateError
from lightning_ft.sharding.mesh import TENSOR_DIMENSION, sharding_part
from lightning_ft.sharding.placements import from_data, to_data

_PIECE = "lightning_ft.piece"


def chunk_bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """Return which of ``length`` rows rank ``index`` of ``count`` holds; the last ranks may hold fewer, or none."""
    each = -(-length // count)
    return min(index * each, length), min((index + 1) * each, length)


def take_apart(state: Any) -> Any:
    """Return ``state`` with this rank's piece in place of each sharded tensor; pieces share the tensors' memory.

    Raises:
        UnsupportedStateError: If a tensor is sharded in a way that can't be put together on another number of ranks.

    """
    return _replace(state, lambda value: isinstance(value, DTensor), _piece_of)


def put_together(states: Sequence[Any], base: int, mesh: DeviceMesh) -> Any:
    """Return what rank ``mesh.get_local_rank()`` of ``mesh`` holds of a state that other ranks had taken apart.

    Args:
        states: What :func:`take_apart` returned on each of them, by their rank.
        base: Whose values are taken where nothing is sharded.
        mesh: One dimension.

    """
    return _put_together(states, base, mesh.get_local_rank(), mesh.size(), lambda *args: _as_tensor(mesh, *args))


def put_back(state: Any, mesh: DeviceMesh) -> Any:
    """Return what a rank had taken apart that held the same shard of equally many, as sharded tensors of ``mesh``."""

    def is_piece(value: Any) -> bool:
        return isinstance(value, dict) and _PIECE in value

    def put(piece: dict[str, Any]) -> Tensor:
        if "dims" in piece:
            part = mesh if list(mesh.mesh_dim_names or ()) == piece["dims"] else mesh[tuple(piece["dims"])]
            return _placed(part, piece[_PIECE], piece["size"], from_data(piece["placements"]))
        return _as_tensor(sharding_part(mesh), piece[_PIECE], piece["size"], piece["dim"])

    return _replace(state, is_piece, put)


def put_together_whole(states: Sequence[Any], base: int = 0) -> Any:
    """Return the state with whole tensors."""
    return _put_together(states, base, 0, 1, lambda local, size, dim: local)


def _put_together(
    states: Sequence[Any], base: int, index: int, count: int, finish: Callable[[Tensor, list[int], int], Tensor]
) -> Any:
    value = states[base]
    if isinstance(value, dict) and _PIECE in value:
        pieces = [state[_PIECE] for state in states]
        return finish(_rows_of(pieces, value["size"], value["dim"], index, count), value["size"], value["dim"])
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key in value:
            made[key] = _put_together([state[key] for state in states], base, index, count, finish)
        return made
    if isinstance(value, list | tuple):
        # Lists of other lengths are what each rank has of its own, and hold no pieces.
        same = all(len(state) == len(value) for state in states)
        parts = [[state[i] for state in states] for i in range(len(value))] if same else [[part] for part in value]
        return type(value)(_put_together(part, base if same else 0, index, count, finish) for part in parts)
    # A copy: what was taken apart may lie in memory that is to be used again.
    return value.clone() if isinstance(value, Tensor) else value


def _rows_of(pieces: Sequence[Tensor], size: Sequence[int], dim: int, index: int, count: int) -> Tensor:
    begin, end = chunk_bounds(size[dim], index, count)
    shape = [*size[:dim], end - begin, *size[dim + 1 :]]
    rows = torch.empty(shape, dtype=pieces[0].dtype)
    for owner, piece in enumerate(pieces):
        first, last = chunk_bounds(size[dim], owner, len(pieces))
        low, high = max(begin, first), min(end, last)
        if low < high:
            rows.narrow(dim, low - begin, high - low).copy_(piece.narrow(dim, low - first, high - low))
    return rows


def _as_tensor(mesh: DeviceMesh, local: Tensor, size: list[int], dim: int) -> Tensor:
    return _placed(mesh, local, size, [Shard(dim)])


def _placed(mesh: DeviceMesh, local: Tensor, size: list[int], placements: Sequence[Placement]) -> Tensor:
    local = local.to(mesh.device_type)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(size), stride=stride)


def _piece_of(tensor: DTensor) -> Any:
    local = tensor.to_local().detach()
    names = tensor.device_mesh.mesh_dim_names
    if names is not None and TENSOR_DIMENSION in names:
        return {_PIECE: local, "size": list(tensor.shape), "dims": list(names), "placements": to_data(tensor.placements)}
    if tensor.device_mesh.ndim == 1 and isinstance(tensor.placements[0], Replicate):
        return local
    if tensor.device_mesh.ndim != 1 or type(tensor.placements[0]) is not Shard:
        kind = f"a tensor placed as {tensor.placements}"
        raise UnsupportedStateError("state", kind, "Shard it over one dimension of ranks.")
    return {_PIECE: local, "size": list(tensor.shape), "dim": tensor.placements[0].dim}


def _replace(value: Any, wanted: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    if wanted(value):
        return replace(value)
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key in value:
            made[key] = _replace(value[key], wanted, replace)
        return made
    if type(value) in (list, tuple):
        return type(value)(_replace(part, wanted, replace) for part in value)
    return value
