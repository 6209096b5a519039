"""One state in memory that outlives the process that wrote it, readable by every rank of the machine."""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ft.elastic.state_codec import EncodedState, decode

_MAGIC = b"LFTslot3"
_CONTROL = struct.Struct(
    "=8s10q"
)  # magic, is whole, generation, step, operation, index, count, call, header bytes, crc of the header, storages
_SIZE = struct.Struct("=q")
_BODY = 256  # where the header begins: behind the control block
_ALIGNMENT = 64


class Moment(NamedTuple):
    """When a state was taken; later ones compare greater.

    Args:
        generation: Number of the generation of ranks that took it.
        step: The step after which it was taken.
        operation: How many operations its ranks had completed: several may be taken after one step, and differ.

    """

    generation: int
    step: int
    operation: int = 0


@dataclass(frozen=True)
class Label:
    """What a slot says about its content.

    Args:
        moment: When it was taken.
        index: Which rank of those that took it together.
        count: How many took it together.
        call: In which Trainer call.

    """

    moment: Moment
    index: int
    count: int
    call: int = 0


class SharedSlot:
    """One memory, which holds one state; written by one process at a time.

    Args:
        path: Where the memory is opened, as :class:`~lightning_ft.supervision.host_memory.HostMemory` says, or a file.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._control: tuple[int, ...] = ()

    def begin(self, label: Label, state: EncodedState) -> list[Tensor]:
        """Make room for a state, whose former content is gone with this call.

        Returns:
            Memory to copy ``state.storages`` to; the state is there after :meth:`finish`.

        Raises:
            OSError: If there is not enough memory; the slot is empty then.

        """
        sizes = [storage.numel() for storage in state.storages]
        places, end = _layout(len(state.header), sizes)
        view = self._writable(end)
        view[: _CONTROL.size] = bytes(_CONTROL.size)
        crc = zlib.crc32(state.header)
        table = b"".join(map(_SIZE.pack, sizes))
        view[_BODY : _BODY + len(state.header) + len(table)] = state.header + table
        self._control = (*label.moment, label.index, label.count, label.call, len(state.header), crc, len(sizes))
        memory: Any = torch.frombuffer(view, dtype=torch.uint8)
        return [memory[place : place + size] for place, size in zip(places, sizes, strict=True)]

    def finish(self) -> None:
        """Say that the state is whole: everything was copied."""
        assert self._map is not None
        # The mark last: whoever is killed between the two leaves an empty slot.
        self._map[: _CONTROL.size] = _CONTROL.pack(_MAGIC, 0, *self._control)
        self._map[len(_MAGIC) : len(_MAGIC) + _SIZE.size] = _SIZE.pack(1)

    def label(self) -> Label | None:
        """Return what the slot holds; None if it holds nothing whole."""
        found = self._read_control()
        return None if found is None else Label(Moment(*found[1:4]), *found[4:7])

    def read(self) -> Any:
        """Return the state; its tensors lie in the slot's memory, and hold until it is written again.

        Raises:
            ValueError: If the slot holds nothing whole.

        """
        found = self._read_control()
        if found is None:
            raise ValueError(f"{self.path} holds no whole state.")
        *_, length, crc, count = found
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            # Copy on write: nothing that is done to what is read changes the slot.
            view = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        header = view[_BODY : _BODY + length]
        if zlib.crc32(header) != crc:
            raise ValueError(f"{self.path} holds a state whose description is damaged.")
        table = view[_BODY + length : _BODY + length + count * _SIZE.size]
        sizes = [size for (size,) in _SIZE.iter_unpack(table)]
        places, end = _layout(length, sizes)
        if end > len(view):
            raise ValueError(f"{self.path} ends at byte {len(view)} of a state of {end}.")
        memory: Any = torch.frombuffer(view, dtype=torch.uint8)
        return decode(header, [memory[place : place + size] for place, size in zip(places, sizes, strict=True)])

    def _read_control(self) -> tuple[int, ...] | None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            block = os.pread(descriptor, _CONTROL.size, 0)
        finally:
            os.close(descriptor)
        if len(block) < _CONTROL.size:
            return None
        magic, *rest = _CONTROL.unpack(block)
        return tuple(rest) if magic == _MAGIC and rest[0] == 1 else None

    def _writable(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                os.pwrite(descriptor, bytes(_CONTROL.size), 0)
                # Without this a lack of memory would be no error, but a signal in the middle of copying.
                os.posix_fallocate(descriptor, 0, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        return self._map


def _layout(header: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each storage begins, and where the last one ends."""
    places: list[int] = []
    end = _BODY + header + len(sizes) * _SIZE.size
    for size in sizes:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(begin)
        end = begin + size
    return places, end
