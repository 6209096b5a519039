"""Turns a checkpoint's directory into a single file that everybody reads."""

import errno
import io
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ft.checkpoint.dcp_reading import read_flat, unflatten
from lightning_ft.checkpoint.lightning_dict import read_checkpoint, state_dict_of
from lightning_ft.checkpoint.store_path import Place, is_store, place
from lightning_ft.checkpoint.verify import verify


def export_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], weights_only: bool | None = None
) -> None:
    """Write a checkpoint as the single file that Lightning's other strategies save.

    Args:
        source: A checkpoint's directory, from any number of ranks.
        target: The file, which is replaced if it is there.
        weights_only: As in ``torch.load``; False if there are objects in it and you trust it.

    Raises:
        DamagedCheckpointError: If it is damaged.
        OSError: If ``target`` can't be written.
        UnpicklingError: If it has objects that ``weights_only`` does not allow.

    """
    _check_target(target)
    verify(source)
    checkpoint = read_checkpoint(source, weights_only)
    _write(Path(target), lambda path: _save(checkpoint, path))


def export_safetensors(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write the weights and buffers of a checkpoint as a file of safetensors.

    Args:
        source: A checkpoint, a directory or a single file.
        target: The file, which is replaced if it is there.

    Returns:
        Names of entries of the ``state_dict`` that are no tensors, which such a file can't hold.

    Raises:
        DamagedCheckpointError: If it is damaged.
        OSError: If ``target`` can't be written.
        ModuleNotFoundError: If safetensors is not installed.

    """
    from safetensors.torch import save_file

    _check_target(target)
    verify(source)
    values = _state_dict(place(source))
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    copies = _without_shared_memory(tensors)
    _write(Path(target), lambda path: save_file(copies, path, metadata={"format": "pt"}))
    return [name for name in values if name not in tensors]


def _state_dict(source: Place) -> dict[str, Any]:
    if source.is_dir():
        # Not the optimizers' states, which are twice as large.
        values = read_flat(source, weights_only=True, wanted=lambda path: not str(path[0]).startswith("optimizer_"))
        return state_dict_of(unflatten(values))
    with source.open("rb") as file:
        return state_dict_of(torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True))


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # torch tells that it is at an unexpected position, because of the error before.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights become two, which loads into a module that ties them as well as into one that does not."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return result


def _check_target(path: str | os.PathLike[str]) -> None:
    """Have a wrong path told before minutes of reading, and by an error of one kind: torch's own is a RuntimeError."""
    if is_store(path):
        raise OSError(errno.EOPNOTSUPP, "A single file is written to a file system: export it to one, and copy it", path)
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "The file can't be written: its directory does not exist", os.fspath(target))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "The file can't be written: there is a directory of this name", str(target))


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """Have a file there whole or not at all."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        try:
            write(temporary)
        except OSError as error:
            raise OSError(error.errno, f"The file can't be written: {error.strerror}", os.fspath(target)) from error
        except Exception as error:  # safetensors has errors of its own
            raise OSError(errno.EIO, f"The file can't be written: {error}", os.fspath(target)) from error
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
