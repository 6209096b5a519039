"""The device mesh of this rank's replica: made once, whatever ranks come and go in its group."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from lightning_ft.elastic.engine import Engine

DIMENSION = "data_parallel"
"""The name by which modules that shard themselves ask for it."""
TENSOR_DIMENSION = "tensor_parallel"
"""The same for the ranks that work on one batch together."""

_meshes: "WeakKeyDictionary[ProcessGroup, DeviceMesh]" = WeakKeyDictionary()


def replica_mesh(engine: Engine, device_type: str) -> DeviceMesh:
    """Return the mesh of this rank's replica: over its shards, or, if ranks share batches, over the rows of those.

    Args:
        engine: Of the job.
        device_type: Of the parameters.

    """
    rows = engine.rows
    if rows is None:
        return shard_mesh(engine.shard_group, device_type)
    ranks = torch.tensor(get_process_group_ranks(engine.shard_group)).view(-1, rows.size)
    known = _meshes.get(rows.row)
    if known is None or known.shape != ranks.shape:  # an earlier Trainer call may have been one of other replicas
        make: Any = DeviceMesh.from_group
        names = (DIMENSION, TENSOR_DIMENSION)
        _meshes[rows.row] = RowMesh.of(make([rows.column, rows.row], device_type, ranks, mesh_dim_names=names))
    return _meshes[rows.row]


class RowMesh(DeviceMesh):
    """A mesh of two dimensions that gives out the same slices whatever rank its process has.

    Torch takes a mesh apart by that rank, which changes while others come and go; user code may ask at any time.
    """

    slices: dict[str, DeviceMesh]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "RowMesh":
        """Return ``mesh`` itself, made by the rank that this process has."""
        slices = {name: mesh[name] for name in mesh.mesh_dim_names or ()}
        own: Any = mesh
        own.__class__, own.slices = cls, slices  # torch's functions that make a mesh make no other type
        return cast(RowMesh, own)

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice of this process."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        return self.slices[names[0]] if len(names) == 1 and names[0] in self.slices else super().__getitem__(mesh_dim_names)


def sharding_part(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a replica's mesh over which parameters are sharded and gathered."""
    return mesh if mesh.ndim == 1 else mesh[DIMENSION]


def at_its_ranks(engine: Engine, mesh: DeviceMesh) -> AbstractContextManager[None]:
    """While this is entered, this process has the rank with which ``mesh`` was made, by which torch takes it apart.

    Ranks change while others come and go; the place of a rank in its replica does not.
    """
    if mesh.ndim == 1:
        return nullcontext()
    coordinate: Any = mesh.get_coordinate()
    return engine.numbered_as(int(mesh.mesh[tuple(coordinate)]), engine.num_slots)


def shard_mesh(group: ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the mesh over ``group``, the same object each time: DTensors of two equal meshes don't mix.

    Args:
        group: Of the ranks of the replica, by shard.
        device_type: Of the parameters.

    """
    return _meshes.get(group) or renewed_mesh(group, device_type)


def renewed_mesh(group: ProcessGroup, device_type: str) -> DeviceMesh:
    """Return a new mesh over the ranks that ``group`` consists of now, and by :func:`shard_mesh` from now on."""
    make: Any = DeviceMesh.from_group
    mesh: DeviceMesh = make(group, device_type, mesh_dim_names=(DIMENSION,))
    _meshes[group] = mesh
    return mesh
