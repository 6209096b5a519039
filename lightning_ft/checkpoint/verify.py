"""Finds out whether a checkpoint is what was saved, before anything is loaded from it."""

import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import xxhash

from lightning_ft.checkpoint.dcp_reading import read_metadata, storage_files
from lightning_ft.checkpoint.kept_copy import KeptCopy
from lightning_ft.checkpoint.layout import MANIFEST, META, METADATA, FileEntry, Manifest, rank_section_name
from lightning_ft.checkpoint.store_path import Place, place
from lightning_ft.errors import DamagedCheckpointError, MalformedStateError, StoreUnreachableError

Thoroughness = Literal["full", "sizes"]
"""``"full"`` reads every byte; ``"sizes"`` reads only small files, and misses a change within a large one."""

_SMALL = 1 << 20
_BLOCK = 4 << 20
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


@dataclass(frozen=True)
class Share:
    """The part of the work that one of several ranks does.

    Args:
        index: Which part.
        total: How many there are.

    """

    index: int = 0
    total: int = 1

    def of(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Return this rank's files: about as many bytes as everybody's."""
        loads = [0] * self.total
        mine = []
        for entry in sorted(entries, key=lambda entry: (-entry.size, entry.path)):
            lightest = loads.index(min(loads))
            loads[lightest] += entry.size + 1
            if lightest == self.index:
                mine.append(entry)
        return mine


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises:
        DamagedCheckpointError: If there is none, or it is not what was written.

    """
    try:
        return Manifest.from_bytes((place(directory) / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpointError(os.fspath(directory), f"{MANIFEST} is missing") from None
    except (OSError, MalformedStateError) as error:
        raise DamagedCheckpointError(os.fspath(directory), _reason(error)) from error


def verify(
    path: str | os.PathLike[str],
    thoroughness: Thoroughness = "full",
    share: Share = Share(),
    copy: KeptCopy | None = None,
) -> Manifest | None:
    """Check a checkpoint: one of ours, another distributed checkpoint of torch, or a single file.

    Args:
        path: The checkpoint.
        thoroughness: How much to read.
        share: Which part of the files to check; all of them together are the check.
        copy: Gets what is read, if there is room.

    Returns:
        The manifest; None if the checkpoint has none, because Lightning or torch wrote it. There are no checksums then,
        except those of files in torch's zip format.

    Raises:
        DamagedCheckpointError: Naming the file and what is wrong with it.
        StoreUnreachableError: If the store that it is in does not answer.

    """
    where = place(path)
    try:
        if not where.exists():
            raise MalformedStateError("it does not exist")
        if share.index != 0 and (not where.is_dir() or not (where / MANIFEST).exists()):
            return None  # one rank does it all
        if not where.is_dir():
            _check_file(where)
            return None
        if not (where / MANIFEST).exists() and not (where / rank_section_name(0)).exists():
            _check_foreign(where)
            return None
        manifest = read_manifest(where)
        copy = copy if copy is not None and copy.has_room(manifest) else None
        _check_entries(where / manifest.data, share.of(manifest.files), thoroughness, copy)
    except (OSError, MalformedStateError) as error:
        raise DamagedCheckpointError(os.fspath(path), _reason(error)) from error
    return manifest


def read_file(directory: Place, name: str) -> bytes:
    """Return a file of a committed checkpoint as it was written.

    Raises:
        FileNotFoundError: If the checkpoint has no such file.
        DamagedCheckpointError: If it is not what was written.

    """
    manifest = read_manifest(directory)
    entry = next((entry for entry in manifest.files if entry.path == name), None)
    if entry is None:
        raise FileNotFoundError(f"{directory} has no {name}")
    try:
        data = (directory / manifest.data / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(os.fspath(directory), _reason(error)) from error
    if len(data) != entry.size or xxhash.xxh3_64_hexdigest(data) != entry.xxh3:
        raise DamagedCheckpointError(os.fspath(directory), f"{name} has another content than when it was written")
    return data


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    try:
        verify(path)
    except (DamagedCheckpointError, StoreUnreachableError) as error:
        return error.reason
    return None


def _check_entries(
    directory: Place, entries: Sequence[FileEntry], thoroughness: Thoroughness, copy: KeptCopy | None
) -> None:
    workers = min(8, os.cpu_count() or 1, max(1, len(entries)))
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda entry: _check_entry(directory, entry, thoroughness, copy), entries):
            pass


def _check_entry(directory: Place, entry: FileEntry, thoroughness: Thoroughness, copy: KeptCopy | None) -> None:
    path = directory / entry.path
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise MalformedStateError(f"{entry.path} is missing") from None
    if size != entry.size:
        raise MalformedStateError(f"{entry.path} has {size} bytes instead of {entry.size}")
    take = _ignore if copy is None else copy.receiver(entry.path)
    if (thoroughness == "full" or size <= _SMALL) and checksum(path, take) != entry.xxh3:
        raise MalformedStateError(f"{entry.path} has another content than when it was written")


def _ignore(block: memoryview) -> None:
    """What is read is wanted for nothing else."""


def checksum(path: Place, take: Callable[[memoryview], None] = _ignore) -> str:
    """Return the XXH3-64 of a file, in hexadecimal; ``take`` gets its blocks, too."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:length])
            take(block[:length])
    return digest.hexdigest()


def _check_foreign(directory: Place) -> None:
    """Check a distributed checkpoint that has no manifest, as far as that goes."""
    if not (directory / METADATA).exists():
        raise MalformedStateError(f"it is no checkpoint: it has neither {MANIFEST} nor {METADATA}")
    for name, length in storage_files(read_metadata(directory)).items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            raise MalformedStateError(f"{name} is missing") from None
        if size < length:
            raise MalformedStateError(f"{name} has {size} bytes, and tensors up to {length}")
    if (directory / META).exists():
        _check_file(directory / META)


def _check_file(path: Place) -> None:
    """Check a file of ``torch.save``: the zip format has a checksum of each part."""
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if start != _ZIP:
        if not start.startswith(_PICKLE):  # torch's older format is a pickle, which can't be checked
            raise MalformedStateError(f"{path.name} is no file that torch.save wrote")
        return
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            part = archive.testzip()
    except zipfile.BadZipFile as error:
        raise MalformedStateError(f"{path.name} is cut off or damaged ({error})") from error
    if part is not None:
        raise MalformedStateError(f"{path.name} is damaged in {part}")


def _reason(error: Exception) -> str:
    if isinstance(error, MalformedStateError):
        return error.reason
    assert isinstance(error, OSError)
    name = f" ({os.path.basename(str(error.filename))})" if error.filename else ""
    return f"{(error.strerror or str(error)).lower()}{name}"
