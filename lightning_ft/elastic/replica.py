"""The ranks that together hold one copy of the model, as one of them sees it."""

from collections.abc import Sequence
from dataclasses import dataclass


class ReplicaLost(BaseException):
    """A rank of this replica is gone, so that the step under way can't be completed by the others of it.

    Not an ``Exception``, which user code might handle: only the strategy knows what to do.
    """


@dataclass(frozen=True)
class Replica:
    """The replica that a rank is part of.

    Args:
        index: Which one it is, of those that are whole.
        shard: Which shard this rank holds.
        slots: Its ranks' slots, in the order of shards.
        count: How many replicas are whole.

    """

    index: int
    shard: int
    slots: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, slot: int, replicas: Sequence[Sequence[int]]) -> "Replica":
        """Return the replica of ``slot``, one of ``replicas``."""
        index = next(i for i, slots in enumerate(replicas) if slot in slots)
        return cls(index, list(replicas[index]).index(slot), tuple(replicas[index]), len(replicas))

    @property
    def size(self) -> int:
        """How many shards there are."""
        return len(self.slots)

    def row(self, size: int) -> "Replica":
        """Return the ``size`` ranks that work on the batches of this rank together, as if they were all of it."""
        first, place = self.shard // size * size, self.shard % size
        return Replica(self.index, place, self.slots[first : first + size], self.count)

    def column(self, size: int) -> "Replica":
        """Return the ranks that have the place of this one in each row of ``size``."""
        return Replica(self.index, self.shard // size, self.slots[self.shard % size :: size], self.count)
