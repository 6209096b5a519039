"""Writes a checkpoint file so that it is there whole or not at all, whatever dies meanwhile."""

import os
from contextlib import suppress
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO


def write_atomically(
    checkpoint_io: CheckpointIO, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
) -> None:
    """Write beside the target, bring it to the disk, and rename.

    Args:
        checkpoint_io: Writes the file; on a remote store, or by ``AsyncCheckpointIO``, it is as atomic as that is.
        checkpoint: What to write.
        filepath: The target.
        storage_options: For ``checkpoint_io``.

    """
    path = os.fspath(filepath)
    if "://" in path or isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        return
    directory, name = os.path.split(os.path.abspath(path))
    # Lightning takes every name with "hpc_ckpt_" in it for a checkpoint to resume from.
    temporary = os.path.join(directory, f"{name.replace('ckpt', 'checkpoint')}.writing")
    try:
        checkpoint_io.save_checkpoint(checkpoint, temporary, storage_options=storage_options)
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(directory)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
