"""Sends typed state from one rank to another through a process group: a header, then one storage after the other."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ft.elastic.state_codec import EncodedState, allocate, decode

_TAG = 7


def send_state(group: ProcessGroup, destination: int, state: EncodedState) -> None:
    """Send ``state`` to rank ``destination``, which is in :func:`receive_state`."""
    header = torch.frombuffer(bytearray(state.header), dtype=torch.uint8)
    for tensor in (torch.tensor([header.numel()]), header, *state.storages):
        _send(group, destination, tensor)


def receive_state(group: ProcessGroup, source: int) -> Any:
    """Return what rank ``source`` sends."""
    length = torch.zeros(1, dtype=torch.int64)
    _receive(group, source, length)
    header = torch.empty(int(length), dtype=torch.uint8)
    _receive(group, source, header)
    packed = header.numpy().tobytes()
    storages = allocate(packed)
    for storage in storages:
        _receive(group, source, storage)
    return decode(packed, storages)


def _send(group: ProcessGroup, destination: int, tensor: Tensor) -> None:
    if tensor.numel():
        group.send([tensor], destination, _TAG).wait()


def _receive(group: ProcessGroup, source: int, tensor: Tensor) -> None:
    if tensor.numel():
        group.recv([tensor], source, _TAG).wait()
