"""The files of one rank in memory, as they will be on the disk, at fixed places: a save only overwrites values.

The memory has no name in any directory, so that whatever dies leaves none of it behind.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_ft.checkpoint._torch_compat import record_offset
from lightning_ft.checkpoint.copying_checksum import CopyingChecksum
from lightning_ft.checkpoint.plan import Entry

_RECORD_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE


class Image:
    """Memory with one file of tensors, room for objects at its end, and other files behind it.

    Args:
        entries: The tensors' pieces that the file holds.
        file_name: Its name.
        name: Of this memory, unique within the process.

    Raises:
        OSError: If there is not enough memory.

    """

    def __init__(self, entries: Sequence[Entry], file_name: str, name: str) -> None:
        self.name = name
        self.entries = tuple(entries)
        self.descriptor = os.memfd_create("lightning_ft-checkpoint", os.MFD_CLOEXEC)
        self.places: list[tuple[int, int]] = []
        """Of each entry where its record begins in the file, and its length."""
        self.files: list[tuple[str, int, int]] = []
        """Of each file its name, where it begins in the memory, and its size; the first one has the tensors."""
        self.size = 0
        self._file_name = file_name
        starts = [self._lay_out(entry) for entry in self.entries]
        self._body_bytes = self.size
        self._memory = mmap.mmap(self.descriptor, self.size) if self.size else None
        self.destinations = self._map(starts)
        self.fill_tail({}, {})

    def _lay_out(self, entry: Entry) -> int:
        """Write an entry's record without its values; return where these begin."""
        head, foot = _record(entry.dtype, entry.sizes)
        begin = _aligned(self.size, _RECORD_ALIGNMENT)
        start, end = begin + len(head), begin + len(head) + entry.nbytes
        _write(self.descriptor, head, begin)
        _write(self.descriptor, foot, end)
        self.size = end + len(foot)
        self.places.append((begin, self.size - begin))
        return start

    def _map(self, starts: Sequence[int]) -> list[Tensor]:
        return [_view(self._memory, entry, start) for entry, start in zip(self.entries, starts, strict=True)]

    def fill_tail(self, objects: dict[str, bytes], files: dict[str, bytes]) -> dict[str, tuple[int, int]]:
        """Set what is not tensors.

        Args:
            objects: For the end of the tensors' file.
            files: Further files.

        Returns:
            Where each object begins in the tensors' file, and its length.

        """
        places, end = {}, self._body_bytes
        for name, content in objects.items():
            _write(self.descriptor, content, end)
            places[name] = (end, len(content))
            end += len(content)
        self.files = [(self._file_name, 0, end)] if end else []
        self._tail = b"".join(objects.values())
        for name, content in files.items():
            begin = _aligned(end, _PAGE)
            _write(self.descriptor, content, begin)
            self.files.append((name, begin, len(content)))
            end = begin + len(content)
        self.size = max(self.size, _aligned(end, _PAGE))
        os.ftruncate(self.descriptor, self.size)
        return places

    def checksum(self) -> CopyingChecksum | None:
        """Return what copies to :attr:`destinations` and so gets the checksum of the first file, if there is one."""
        return CopyingChecksum(memoryview(self._memory or b""), self._tail) if self.files else None

    def view(self) -> mmap.mmap:
        """Return the whole memory, for a writer within this process."""
        return mmap.mmap(self.descriptor, self.size)

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self.destinations, self._memory = [], None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@lru_cache(maxsize=64)
def _record(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what ``torch.save`` writes before and after the values of a tensor.

    The archive holds a CRC of the values, which torch writes and never checks; that of the template stays. The manifest's
    checksums are of what is there.
    """
    buffer = io.BytesIO()
    torch.save(torch.zeros(sizes, dtype=dtype), buffer)
    buffer.seek(0)
    start = record_offset(buffer)
    content = buffer.getbuffer()
    return bytes(content[:start]), bytes(content[start + torch.Size(sizes).numel() * dtype.itemsize :])


def _view(memory: mmap.mmap | None, entry: Entry, start: int) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.sizes, dtype=entry.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=start)
    return flat.view(entry.dtype).view(entry.sizes)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _write(descriptor: int, content: bytes | memoryview, position: int) -> None:
    rest = memoryview(content)
    while len(rest):
        count = os.pwrite(descriptor, rest, position)
        rest, position = rest[count:], position + count


def pickled(values: Iterable[tuple[str, object]]) -> dict[str, bytes]:
    """Return objects as DCP stores them."""
    return {name: _saved_once(value, repr(value)) if _is_plain(value) else _saved(value) for name, value in values}


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@lru_cache(maxsize=256)
def _saved_once(value: object, text: str) -> bytes:
    """Return what :func:`_saved` does; ``text`` tells 1 from 1.0 and True. Most options of optimizers never change."""
    return _saved(value)


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return len(value) < 10 and all(map(_is_plain, value))
    return type(value) in (bool, int, float, type(None)) or (type(value) is str and len(value) < 100)
