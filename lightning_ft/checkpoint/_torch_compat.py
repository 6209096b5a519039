"""Every name of torch without a promise that checkpoints use, checked when it is imported."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, device_mesh
from torch.distributed.checkpoint import _nested_dict, default_planner, filesystem, metadata
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    *("default_store", "flatten", "make_metadata", "record_offset", "store_of_default_group", "whole_mesh", "write_items"),
]

_REQUIRED: tuple[tuple[Any, str], ...] = (
    (_nested_dict, "flatten_state_dict"),
    (default_planner, "create_default_local_save_plan"),
    (filesystem, "_StorageInfo"),
    (metadata, "StorageMeta"),
    (torch._C, "PyTorchFileReader"),
    (dist.distributed_c10d, "_get_default_store"),
)
_missing = [f"{owner.__name__}.{name}" for owner, name in _REQUIRED if not hasattr(owner, name)]
if _missing:
    raise ImportError(
        f"lightning_ft does not know torch {torch.__version__}: {', '.join(_missing)} is missing."
        " Install a torch release within the range that lightning_ft's package metadata states."
    )

FORMAT_VERSION = "1.0.0"
"""Of DCP's metadata, as torch 2.6 and later write it."""


def flatten(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of nested dicts and lists by dotted names, and the path to each, as DCP names them."""
    return _nested_dict.flatten_state_dict(state)


def write_items(leaves: dict[str, Any]) -> list[WriteItem]:
    """Return what DCP would write of these leaves if nobody else wrote any: chunks of tensors, and objects."""
    return create_default_local_save_plan(leaves, is_coordinator=True).items


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
        return root
    return device_mesh._mesh_resources.get_root_mesh(mesh)  # before torch 2.10


def record_offset(archive: Any) -> int:
    """Return where the only tensor's memory begins in a file that ``torch.save`` wrote."""
    reader: Any = torch._C.PyTorchFileReader(archive)
    return int(reader.get_record_offset("data/0"))


def make_metadata(described: dict[str, Any], places: dict[Any, tuple[str, int, int]], mappings: dict[str, Any]) -> Metadata:
    """Return DCP's metadata.

    Args:
        described: What each name is.
        places: Of each piece the file, where it begins there, and its length.
        mappings: From names to paths, as :func:`flatten` returned them.

    """
    return Metadata(
        state_dict_metadata=described,
        planner_data=mappings,
        storage_data={index: filesystem._StorageInfo(*place) for index, place in places.items()},
        storage_meta=StorageMeta(),
        version=FORMAT_VERSION,
    )


def default_store() -> Store:
    """Return a connection of its own to the store by which the default process group was made."""
    store = store_of_default_group()
    # Whoever waits in a store keeps every other user of the same connection waiting.
    return store.clone() if hasattr(store, "clone") else store


def store_of_default_group() -> Store:
    """Return the store by which the default process group was made; nobody else may wait in it."""
    return dist.distributed_c10d._get_default_store()
