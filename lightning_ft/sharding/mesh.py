"""The device mesh of this rank's replica: made once, whatever ranks come and go in its group."""

from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

DIMENSION = "data_parallel"
"""The name by which modules that shard themselves ask for it."""

_meshes: "WeakKeyDictionary[ProcessGroup, DeviceMesh]" = WeakKeyDictionary()


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
