"""Which ranks hold one copy of the model together, and which of its shards each: pure bookkeeping.

A replica lives as long as all its ranks. The mates of one that is gone are free, and so are ranks that come back: as soon as
every shard is among them there is a new replica. Where ranks of a replica share batches, that depends on who they are: there
each slot has its place, and a replica is whole again when all its slots are back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

ShardSize = int | Literal["all"]


class Replicas:
    """The replicas of the members, by seniority; each lists its slots in the order of shards."""

    def __init__(self) -> None:
        self.all: list[list[int]] = []

    @property
    def slots(self) -> list[int]:
        """All their slots: global ranks are positions in this list."""
        return [slot for replica in self.all for slot in replica]

    def start(self, slots: Sequence[int], size: ShardSize, *, anew: bool = False, in_place: bool = False) -> None:
        """Divide ``slots``, all of them if their number allows; replicas that are whole stay together.

        Args:
            slots: Who is there.
            size: How many ranks a replica has.
            anew: Whether none of them holds anything yet. Otherwise a slot tells which shard its rank may hold.
            in_place: As in :func:`form`.

        """
        whole = [replica for replica in self.all if len(replica) == size and set(replica) <= set(slots)]
        if in_place:
            whole = [replica for replica in whole if [replica] == form(dict.fromkeys(replica, 0), size, in_place=True)]
        kept = {slot for replica in whole for slot in replica}
        others = [slot for slot in slots if slot not in kept]
        count = 1 if size == "all" else size
        shards = {slot: (place if anew and not in_place else slot) % count for place, slot in enumerate(others)}
        self.all = [*whole, *form(shards, size, in_place=in_place)]

    def add(self, replica: Sequence[int], size: ShardSize) -> None:
        """Add a new one; if a replica is whatever is alive, it becomes part of the one there is."""
        if size == "all" and self.all:
            self.all[0].extend(replica)
        else:
            self.all.append(list(replica))

    def dissolve(self, slot: int) -> list[int]:
        """Take out the replica of ``slot``; return the others in it."""
        replica = next(replica for replica in self.all if slot in replica)
        self.all.remove(replica)
        return [mate for mate in replica if mate != slot]

    def discard(self, slot: int) -> None:
        """Take out ``slot`` alone."""
        for replica in self.all:
            if slot in replica:
                replica.remove(slot)
        self.all = [replica for replica in self.all if replica]


def form(free: Mapping[int, int], size: ShardSize, *, in_place: bool = False) -> list[list[int]]:
    """Return the new replicas that free ranks make up.

    Args:
        free: Which shard each of them holds or is to hold, by slot; who comes first is taken first.
        size: How many shards there are; "all": as many as free ranks, whatever they hold.
        in_place: Whether only slots that follow each other are a replica, whatever they are said to hold.

    """
    if size == "all":
        return [list(free)] if free else []
    if in_place:
        homes = [range(slot, slot + size) for slot in sorted(free) if slot % size == 0]
        return [list(home) for home in homes if all(slot in free for slot in home)]
    holders = [[slot for slot, shard in free.items() if shard == wanted] for wanted in range(size)]
    return [list(replica) for replica in zip(*holders, strict=False)]


def shard_for(slot: int, taken: Collection[int] | Iterable[int], size: ShardSize) -> int:
    """Return the shard that a rank is to hold which comes back: the one that the free ranks lack most.

    Args:
        slot: Its slot; if nothing else tells, the shard is the one that the slot began with.
        taken: The shards of the other free ranks.
        size: How many shards there are.

    """
    if size == "all":
        return 0
    counts = Counter(taken)
    return min(range(size), key=lambda shard: (counts[shard], shard != slot % size, shard))
