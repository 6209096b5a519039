"""Reads torch's distributed checkpoints without running what a pickle in them may ask for."""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_ft.checkpoint.layout import MANIFEST, METADATA, Manifest
from lightning_ft.checkpoint.store_path import Place, place
from lightning_ft.errors import MalformedStateError


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the parts of ``.metadata`` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = None if "." in name else super().find_class(module, name) if module in _MODULES else None
        known = found is torch.Size or found is _StorageInfo or isinstance(found, torch.dtype)
        known |= isinstance(found, type) and found.__module__ == dcp_metadata.__name__
        if not known and (module, name) not in _FUNCTIONS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint's metadata")
        return super().find_class(module, name)


_MODULES = (dcp_metadata.__name__, _StorageInfo.__module__, "torch")
# Paths in `StorageMeta`: where it was saved.
_FUNCTIONS = {("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


def content_directory(directory: Place) -> Place:
    """Return where the files of a checkpoint are.

    Raises:
        MalformedStateError: If its manifest is damaged.

    """
    if isinstance(directory, Path):
        return directory
    try:
        return directory / Manifest.from_bytes((directory / MANIFEST).read_bytes()).data
    except FileNotFoundError:  # somebody else's
        return directory


def read_metadata(directory: Place) -> Metadata:
    """Return what a directory's ``.metadata`` says.

    Raises:
        OSError: If it can't be read.
        MalformedStateError: If it is not such a file.

    """
    data = (content_directory(directory) / METADATA).read_bytes()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever the bytes of a damaged pickle lead to
        raise MalformedStateError(f"{METADATA} can't be read ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise MalformedStateError(f"{METADATA} holds a {type(metadata).__name__}")
    return metadata


def storage_files(metadata: Metadata) -> dict[str, int]:
    """Return the files with tensors, and how long each must be at least."""
    files: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        if isinstance(info, _StorageInfo):
            files[info.relative_path] = max(files.get(info.relative_path, 0), info.offset + info.length)
    return files


class _Places(FileSystem):
    """What torch's reader asks its file system for, in a store, too."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with place(path).open(mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return place(path) / suffix

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return place(path)


class TypedReader(FileSystemReader):
    """torch's reader of a directory, with metadata that is only data."""

    def __init__(self, directory: Place, metadata: Metadata) -> None:
        super().__init__(os.curdir)
        self.fs = _Places()
        self.path = content_directory(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """torch's planner of flat states, whose single values are loaded as ``weights_only`` says."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


def read_flat(
    directory: Place,
    *,
    weights_only: bool | None = None,
    wanted: Callable[[tuple[str | int, ...]], bool] = lambda path: True,
    into: Mapping[tuple[str | int, ...], torch.Tensor] | None = None,
) -> dict[tuple[str | int, ...], Any]:
    """Return values of a distributed checkpoint by their paths in the state that was saved.

    Each process reads for itself. Whatever was sharded when it was saved is put together.

    Args:
        directory: The checkpoint.
        weights_only: For what is not a tensor, as in ``torch.load``.
        wanted: Which paths to read.
        into: Tensors to read into, DTensors among them, of which only the local part is read. Others are made.

    Raises:
        MalformedStateError: If it is no checkpoint.

    """
    metadata = read_metadata(directory)
    planner_data = metadata.planner_data or {}
    paths = {key: tuple(planner_data.get(key, (key,))) for key in metadata.state_dict_metadata}
    state: dict[str, Any] = {}
    for key, described in metadata.state_dict_metadata.items():
        if not wanted(paths[key]):
            continue
        if isinstance(described, TensorStorageMetadata):
            target = None if into is None else into.get(paths[key])
            state[key] = torch.empty(described.size, dtype=described.properties.dtype) if target is None else target
        else:
            state[key] = None
    _load_state_dict(state, TypedReader(directory, metadata), no_dist=True, planner=_Planner(weights_only))
    return {paths[key]: value for key, value in state.items()}


def unflatten(values: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Return the nested state to which flat values belong: keys of dicts are strings, positions in lists numbers."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        container = root
        for key in path[:-1]:
            container = container.setdefault(key, {})
        container[path[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    if parts and all(type(key) is int for key in parts):
        return [parts[key] for key in sorted(parts)]
    return parts
