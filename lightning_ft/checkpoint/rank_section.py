"""Reads and writes what only one rank had: its place in the data, its random numbers. Typed, no pickle."""

import os
import struct
from pathlib import Path
from typing import Any

import torch

from lightning_ft.checkpoint.layout import rank_section_name
from lightning_ft.elastic.state_codec import allocate, decode, encode
from lightning_ft.errors import MalformedStateError

_MAGIC = b"LFTRANK1"
_HEADER = struct.Struct("<8sQ")


def section_bytes(state: dict[str, Any]) -> bytes:
    """Return the content of a rank's section.

    Args:
        state: Plain data and small tensors.

    Raises:
        UnsupportedStateError: If there is anything else in it.

    """
    encoded = encode(state)
    storages = [storage.numpy().tobytes() for storage in encoded.storages]
    return b"".join([_HEADER.pack(_MAGIC, len(encoded.header)), encoded.header, *storages])


def parse_section(data: bytes) -> dict[str, Any]:
    """Return what :func:`section_bytes` was given.

    Raises:
        MalformedStateError: If it is not that.

    """
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedStateError(f"{len(data)} bytes are no section of a rank")
    _, length = _HEADER.unpack_from(data)
    header = data[_HEADER.size : _HEADER.size + length]
    storages = allocate(header)
    position = _HEADER.size + length
    if position + sum(storage.numel() for storage in storages) != len(data):
        raise MalformedStateError(f"a section of {len(data)} bytes does not have the length that its header says")
    for storage in storages:
        end = position + storage.numel()
        if end > position:
            storage.copy_(torch.frombuffer(bytearray(data[position:end]), dtype=torch.uint8))
        position = end
    state = decode(header, storages)
    if not isinstance(state, dict):
        raise MalformedStateError(f"the section of a rank is a {type(state).__name__}, not a dict")
    return state


def read_section(directory: str | os.PathLike[str], rank: int) -> dict[str, Any] | None:
    """Return what rank ``rank`` of the run that wrote the checkpoint had for itself; None if it left nothing."""
    path = Path(directory) / rank_section_name(rank)
    return parse_section(path.read_bytes()) if path.exists() else None
