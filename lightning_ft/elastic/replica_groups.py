"""The groups within which a rank's state is divided, and across which it is repeated.

The group of a replica is kept as long as its ranks are; the one across replicas is made for each generation, as the group of
all members is. If every rank is a replica by itself there are none: the group of all members is the one across replicas.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

from lightning_ft.elastic._torch_compat import install_shard_group, number_shard_group
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.elastic.groups import Group, Groups
from lightning_ft.elastic.protocol import NO_SLOT, Generation
from lightning_ft.elastic.replica import Replica
from lightning_ft.elastic.replica_rows import ReplicaRows
from lightning_ft.elastic.shard_group import ShardGroup
from lightning_ft.elastic.vigil import Vigil

_NONE = -1


class ReplicaGroups:
    """Groups of the replica that this process is part of.

    Args:
        groups: Makes them.
        slot: This process's slot.
        num_slots: How many slots the job has.
        waits: How to wait in the replica's group.
        fail: Called when a collective of the replica finds that one of its ranks is gone; raises, or does not return.

    """

    def __init__(self, groups: Groups, slot: int, num_slots: int, waits: Vigil, fail: Callable[[], NoReturn]) -> None:
        self._fail = fail
        self.replica = Replica(0, 0, (slot,), num_slots)
        self.replicate: Group | None = None
        self.row_size = 1
        """How many ranks of a replica work on one batch together."""
        self._groups = groups
        self._num_slots = num_slots
        self._waits = waits
        self._proxy: ShardGroup | None = None
        self._is_alone = False
        self._made = _NONE  # in which generation the replica's group was connected
        self._connected: tuple[tuple[int, ...], int] | None = None
        self._rows: dict[int, ReplicaRows] = {}

    @property
    def shard_group(self) -> ShardGroup:
        """Return the group of the replica, the same object for the life of the process."""
        if self._proxy is None:
            self._proxy = ShardGroup(self.replica, self._fail)
            install_shard_group(self._proxy)
            self._number()
        return self._proxy

    @property
    def rows(self) -> ReplicaRows | None:
        """Return the groups within the replica, the same objects for the life of the process; None if none share batches."""
        if self.row_size == 1:
            return None
        if self.row_size not in self._rows:
            self._rows[self.row_size] = ReplicaRows(self.row_size, self.replica, self._fail)
            self._number()
        return self._rows[self.row_size]

    def prepare(self, slot: int, shard: int, size: int) -> None:
        """Let this process, which is to join, do by itself what it will do as ``shard`` of ``size``."""
        slots = [NO_SLOT] * size
        slots[shard] = slot
        self.replica, self._is_alone = Replica(0, shard, tuple(slots), 1), True
        self._number()

    def lives_in(self, generation: Generation) -> bool:
        """Whether this replica goes on in ``generation``; called from the link's thread, too."""
        slots = self.replica.slots
        return len(slots) == 1 or generation["ending"] or list(slots) in generation["replicas"]

    def connect(self, generation: Generation, slot: int, group: Group, vigil: Vigil) -> None:
        """Collective. Connect what ``generation`` needs beside the group of all its members.

        Raises:
            RuntimeError: If a member died meanwhile.

        """
        replicas = generation["replicas"]
        if generation["ending"]:
            return  # all that is left to do is to agree on that
        replica = Replica.of(slot, replicas)
        if replica.size > 1:
            if replica.count > 1:
                self.replicate = self._groups.create(replica.index, replica.count, vigil, name=f"shard{replica.shard}")
            self._connect_replica(replica, generation, group, vigil)
        else:
            self.replicate = group if replica.count > 1 else None
        self.replica, self._is_alone = replica, False
        self._number()

    def _connect_replica(self, replica: Replica, generation: Generation, group: Group, vigil: Vigil) -> None:
        """Keep the replica's group if all its ranks have it, else make it anew."""
        proxy, rows = self.shard_group, self.rows
        has_it = proxy.is_connected and self._connected == (replica.slots, self.row_size)
        mine = torch.tensor([self._made if has_it else _NONE])
        rank = generation["members"].index(replica.slots[replica.shard])
        table = Exchange(group, rank, len(generation["members"]), []).all_gather(mine)
        first = replica.index * replica.size
        made = {int(row) for row in table[first : first + replica.size]}
        if len(made) > 1 or _NONE in made:
            self.lose()
            name = f"replica{replica.index}"
            inner = self._groups.create(replica.shard, replica.size, vigil, name=name, waits=self._waits)
            proxy.connect(inner)
            if rows is not None:
                rows.connect(self._groups, replica, vigil, self._waits)
            self._made, self._connected = generation["number"], (replica.slots, self.row_size)

    def break_off(self) -> None:
        """Let go of the group across replicas, whose generation is over; its sockets are shut already."""
        if self.replicate is not None and self.replica.size > 1:
            self._groups.retire(self.replicate)
        self.replicate = None

    def interrupt(self) -> None:
        """Make whatever waits inside the replica raise; called from the link's thread, too."""
        if self._made != _NONE:
            self._groups.interrupt_replica(self._made)

    def lose(self) -> None:
        """Break the replica's group off, on all its ranks."""
        inner = None if self._proxy is None else self._proxy.lose()
        lost = [] if inner is None else [inner]
        for rows in self._rows.values():
            lost += rows.lose()
        if lost:
            self.interrupt()
        for group in lost:
            self._groups.retire(group)
        self._connected = None

    def _number(self) -> None:
        """Say which global ranks the shards are."""
        if self._proxy is None:
            return
        size, shard, first = self.replica.size, self.replica.shard, self.replica.index * self.replica.size
        if self._is_alone:  # by itself, a process that joins takes itself for the last rank
            ranks = list(range(self._num_slots - size, self._num_slots - 1))
            ranks.insert(shard, self._num_slots - 1)
        else:
            ranks = list(range(first, first + size))
        self._proxy.replica = self.replica
        number_shard_group(self._proxy, ranks)
        if self.row_size in self._rows:
            self._rows[self.row_size].number(self.replica, ranks)
