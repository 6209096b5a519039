"""Which rank writes which part of the state: a pure function of what each rank knows, so that nobody has to ask.

Ranks that hold equal copies of a tensor divide the writing of whole tensors by size. What is sharded is written by the
rank that holds the shard, or, if there are several, by one of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Replicate

from lightning_ft.checkpoint._torch_compat import flatten, whole_mesh, write_items


@dataclass(frozen=True)
class Seat:
    """Where this rank is among those that save.

    Args:
        rank: Its position among them.
        world_size: How many they are.
        replica: Which copy of the sharded tensors this rank has a part of, as far as their meshes do not say.
        num_replicas: How many copies there are.

    """

    rank: int
    world_size: int
    replica: int = 0
    num_replicas: int = 1


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor: one record of a ``.distcp`` file.

    Args:
        name: Of the tensor, as DCP flattens the state.
        dtype: Of the tensor.
        shape: Of the whole tensor.
        offsets: Where the piece begins in it.
        sizes: Shape of the piece.

    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its memory."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Flat:
    """A state as DCP sees it.

    Args:
        leaves: Tensors and objects by dotted name.
        mappings: The path to each.

    """

    leaves: dict[str, Any]
    mappings: dict[str, Any]

    @classmethod
    def of(cls, state: dict[str, Any]) -> Flat:
        """Flatten a state."""
        return cls(*flatten(state))

    def signature(self) -> tuple[Any, ...]:
        """Return what a plan depends on; equal for two states that are written alike."""
        return tuple(_sign(name, leaf) for name, leaf in self.leaves.items())


def _sign(name: str, leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, Tensor):
        return (name,)
    if isinstance(leaf, DTensor):
        return (name, leaf.dtype, leaf.shape, leaf.to_local().shape, leaf.placements, leaf.device_mesh)
    return (name, leaf.dtype, leaf.shape, leaf.layout)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_record(leaf: Any) -> bool:
    """Whether a leaf is written as raw memory; other tensors are pickled, as objects are."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized


def divide(flat: Flat, seat: Seat, differing: Collection[str] = ()) -> list[Entry]:
    """Return what this rank writes.

    Args:
        flat: The state.
        seat: Of this rank.
        differing: Names of tensors that ranks need not have alike, such as buffers: they are those of the first one.

    """
    groups: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    records = {name: leaf for name, leaf in flat.leaves.items() if is_record(leaf)}
    for item in write_items(records):
        assert item.tensor_data is not None
        chunk, name = item.tensor_data.chunk, item.index.fqn
        copy, num_copies = _copy_of(name, records[name], seat)
        entry = Entry(
            name, item.tensor_data.properties.dtype, *map(tuple, (item.tensor_data.size, chunk.offsets, chunk.sizes))
        )
        if name in differing:
            if copy > 0:
                continue
            num_copies = 1
        groups[copy, num_copies].append(entry)
    return [entry for (copy, num_copies), entries in groups.items() for entry in _share(entries, copy, num_copies)]


def _copy_of(name: str, tensor: Tensor, seat: Seat) -> tuple[int, int]:
    """Return which of how many equal copies of its part of a tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return seat.rank, seat.world_size
    copy, num_copies = seat.replica, seat.num_replicas
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name} is on a mesh without this rank"
    for placement, position, size in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Replicate):
            copy, num_copies = copy * size + position, num_copies * size
    whole = whole_mesh(tensor.device_mesh)
    own, names = tensor.device_mesh.mesh_dim_names or (), whole.mesh_dim_names or ()
    for dimension, (name, position) in enumerate(zip(names, whole.get_coordinate() or (), strict=False)):
        if name not in own:  # the ranks along it hold the same, though the tensor does not say so
            copy, num_copies = copy * whole.size(dimension) + position, num_copies * whole.size(dimension)
    return copy, num_copies


def _share(entries: list[Entry], copy: int, num_copies: int) -> Iterable[Entry]:
    """Return those of ``entries`` that this copy writes: large ones first, each to whom least was given."""
    loads = [(0, number) for number in range(num_copies)]
    for entry in sorted(entries, key=lambda entry: (-entry.nbytes, entry.name, entry.offsets)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + entry.nbytes, number))
        if number == copy:
            yield entry


def describe(entries: Iterable[Entry], objects: Iterable[str]) -> dict[str, Any]:
    """Return what DCP's metadata says of the whole state: of every rank's entries, and of objects."""
    chunks: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        chunks[entry.name].append(entry)
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in objects}
    for name, parts in chunks.items():
        places = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in parts]
        properties = TensorProperties(dtype=parts[0].dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(parts[0].shape), places)
    return described


def index_of(entry: Entry) -> MetadataIndex:
    """Return DCP's key of an entry."""
    return MetadataIndex(entry.name, torch.Size(entry.offsets))
