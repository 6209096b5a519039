"""What every collective operation begins with: all ranks say which operation they are in, before any data flows.

gloo ends the process of every rank when two of them are in collectives of different sizes. So each operation starts with
an exchange of headers of one fixed size: a mismatch becomes an error that names both operations, on all ranks. A small
payload rides in the header, so that barriers and scalars need no second message.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ft.elastic.groups import Group, Work
from lightning_ft.errors import CollectiveMismatchError, GroupBrokenError

INLINE_BYTES = 96
INTERRUPT = "interrupt"
"""The operation that ends whichever one the others are in."""

_LABEL_BYTES = 44
_LAYOUT = struct.Struct(f"=qqi{_LABEL_BYTES}s{INLINE_BYTES}s")


class Interrupted(BaseException):
    """A rank broke off what all were in, and so do the others; not an ``Exception``, which user code might handle."""


def pack_header(sequence: int, size: int, label: str, inline: bytes) -> Tensor:
    """Return the header of one rank as bytes.

    Args:
        sequence: How many operations this rank completed before.
        size: Bytes of the data that follows; 0 if ranks may differ in it.
        label: Names the operation, for the error when ranks differ.
        inline: The payload that rides along.

    """
    assert len(inline) <= INLINE_BYTES, f"{label}: {len(inline)} bytes do not fit into the header"
    text = label.encode("ascii", "replace")[:_LABEL_BYTES]
    return torch.frombuffer(bytearray(_LAYOUT.pack(sequence, size, len(inline), text, inline)), dtype=torch.uint8)


def _describe(sequence: int, size: int, label: bytes) -> str:
    text = label.rstrip(b"\0").decode()
    return f"{text} (operation {sequence}, {size} bytes)" if size else f"{text} (operation {sequence})"


def check_headers(headers: Sequence[bytes]) -> list[bytes]:
    """Return every rank's payload.

    Raises:
        CollectiveMismatchError: If the ranks are not in the same operation.
        Interrupted: If one of them interrupts the others in theirs.

    """
    parsed = [_LAYOUT.unpack(header) for header in headers]
    if any(label.rstrip(b"\0").decode() == INTERRUPT for _, _, _, label, _ in parsed):
        raise Interrupted
    wanted = parsed[0][:2] + parsed[0][3:4]
    different = [rank for rank, (seq, size, _, label, _) in enumerate(parsed) if (seq, size, label) != wanted]
    if different:
        seq, size, _, label, _ = parsed[different[0]]
        same = [rank for rank in range(len(parsed)) if rank not in different]
        raise CollectiveMismatchError(_describe(*wanted), same, _describe(seq, size, label), different)
    return [inline[:length] for _, _, length, _, inline in parsed]


class Exchange:
    """One operation in progress: its group, and what every rank sent along.

    Args:
        group: The generation's group; None if this process is alone.
        rank: This rank.
        size: Number of ranks.
        inline: Every rank's payload, in rank order.
        replicate: Connects those who hold the same shard as this rank, one of each replica; None if there is one replica.
        num_replicas: How many replicas there are.

    """

    def __init__(
        self,
        group: Group | None,
        rank: int,
        size: int,
        inline: list[bytes],
        replicate: Group | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.group = group
        self.replicate = replicate
        self.num_replicas = num_replicas
        self.rank = rank
        self.size = size
        self.inline = inline

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over all ranks, in place."""
        if self.group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self.group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite ``tensor`` with that of rank ``src``."""
        if self.group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = src
            self.group.broadcast([tensor], options).wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        if self.group is None:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([gathered], [tensor]).wait()
        return gathered


class PendingExchange:
    """Headers on their way; opened early so that they travel while this rank computes.

    Args:
        group: The generation's group; None if this process is alone.
        rank: This rank.
        size: Number of ranks.
        header: This rank's header.
        replicate: As in the exchange that comes of it.
        num_replicas: As in the exchange that comes of it.

    """

    def __init__(
        self,
        group: Group | None,
        rank: int,
        size: int,
        header: Tensor,
        replicate: Group | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.group, self.size = group, size
        self.replicate, self.num_replicas = replicate, num_replicas
        self.withdrawn = False
        """Whether another operation came first: this one will be opened anew."""
        self._rank = rank
        self._headers = [header] if group is None else [torch.empty_like(header) for _ in range(size)]
        self._done: Exchange | None = None
        self._error: str | None = None  # an exception would hold this object, and the group, by its traceback
        self._work: Work | None = None
        if group is not None:
            try:
                self._work = group.allgather([self._headers], [header])
            except GroupBrokenError as error:  # the group broke before this operation: reported where it is waited for
                self._error = str(error)

    @property
    def ready(self) -> bool:
        """Whether :meth:`wait` returns at once: every rank is in this operation."""
        return self._done is not None or self._work is None or self._work.is_completed()

    def wait(self) -> Exchange:
        """Collective. Return once every rank said what it is in.

        Raises:
            CollectiveMismatchError: If that is not the same operation.
            GroupBrokenError: If the group broke.

        """
        if self._done is None:
            if self._error is not None:
                raise GroupBrokenError(self._error)
            if self._work is not None:
                self._work.wait()
            inline = check_headers([header.numpy().tobytes() for header in self._headers])
            self._done = Exchange(self.group, self._rank, self.size, inline, self.replicate, self.num_replicas)
        return self._done


Body = Callable[[Exchange], Any]
