"""Sends typed state from one rank to another through a process group: a header, then the storages in packs.

Most states hold hundreds of small tensors, and a message costs about the same whatever its size: storages travel in packs
of a few megabytes, larger ones by themselves and without a copy.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ft.elastic.state_codec import EncodedState, allocate, decode

_TAG = 7
_PACK_BYTES = 4 << 20


def send_state(group: ProcessGroup, destination: int, state: EncodedState) -> None:
    """Send ``state`` to rank ``destination``, which is in :func:`receive_state`."""
    header = torch.frombuffer(bytearray(state.header), dtype=torch.uint8)
    _send(group, destination, torch.tensor([header.numel()]))
    _send(group, destination, header)
    for pack in _packs(state.storages):
        _send(group, destination, pack[0] if len(pack) == 1 else torch.cat(pack))


def receive_state(group: ProcessGroup, source: int) -> Any:
    """Return what rank ``source`` sends."""
    length = torch.zeros(1, dtype=torch.int64)
    _receive(group, source, length)
    header = torch.empty(int(length), dtype=torch.uint8)
    _receive(group, source, header)
    packed = header.numpy().tobytes()
    storages = allocate(packed)
    for pack in _packs(storages):
        if len(pack) == 1:
            _receive(group, source, pack[0])
            continue
        buffer = torch.empty(sum(storage.numel() for storage in pack), dtype=torch.uint8)
        _receive(group, source, buffer)
        torch._foreach_copy_(pack, buffer.split([storage.numel() for storage in pack]))
    return decode(packed, storages)


def _packs(storages: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut the sequence into runs of about a pack's size; the same on both sides, which know all sizes."""
    number, filled = 0, 0
    numbers: list[int] = []
    for storage in storages:
        if filled and filled + storage.numel() > _PACK_BYTES:
            number, filled = number + 1, 0
        filled += storage.numel()
        numbers.append(number)
    for _, run in groupby(zip(numbers, storages, strict=True), key=lambda item: item[0]):
        yield [storage for _, storage in run]


def _send(group: ProcessGroup, destination: int, tensor: Tensor) -> None:
    if tensor.numel():
        group.send([tensor], destination, _TAG).wait()


def _receive(group: ProcessGroup, source: int, tensor: Tensor) -> None:
    if tensor.numel():
        group.recv([tensor], source, _TAG).wait()
