"""The groups within a replica whose ranks share batches: its ranks in rows, each of which works on one batch.

A replica of four ranks with rows of two is the grid (0, 1), (2, 3): ranks 0 and 1 have the same batch, ranks 0 and 2 do the
same part of the work on theirs.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_ft.elastic._torch_compat import SHARD_GROUP_NAME, install_shard_group, number_shard_group
from lightning_ft.elastic.groups import Group, Groups
from lightning_ft.elastic.replica import Replica
from lightning_ft.elastic.shard_group import ShardGroup
from lightning_ft.elastic.vigil import Vigil


class ReplicaRows:
    """The row and the column of this process in its replica.

    Args:
        size: Of a row.
        replica: The replica.
        fail: Called when a collective finds that a rank of the replica is gone; raises, or does not return.

    """

    def __init__(self, size: int, replica: Replica, fail: Callable[[], NoReturn]) -> None:
        self.size = size
        self.column = ShardGroup(replica.column(size), fail, f"{SHARD_GROUP_NAME}_column{size}")
        self.row = ShardGroup(replica.row(size), fail, f"{SHARD_GROUP_NAME}_row{size}")
        install_shard_group(self.column)
        install_shard_group(self.row)

    def number(self, replica: Replica, ranks: Sequence[int]) -> None:
        """Say which global ranks those of ``replica`` are, of which this process is part now."""
        self.column.replica, self.row.replica = replica.column(self.size), replica.row(self.size)
        first, place = replica.shard // self.size * self.size, replica.shard % self.size
        number_shard_group(self.column, ranks[place :: self.size])
        number_shard_group(self.row, ranks[first : first + self.size])

    def connect(self, groups: Groups, replica: Replica, vigil: Vigil, waits: Vigil) -> None:
        """Collective in the replica. Connect the row and the column; a group of one rank needs no connection.

        Raises:
            RuntimeError: If a member died meanwhile.

        """
        name = f"replica{replica.index}"
        row, column = replica.row(self.size), replica.column(self.size)
        for proxy, part, which in (
            (self.row, row, f"row{column.shard}"),
            (self.column, column, f"column{row.shard}"),
        ):
            is_alone = part.size == 1
            inner = None if is_alone else groups.create(part.shard, part.size, vigil, name=f"{name}{which}", waits=waits)
            proxy.connect(inner)

    def lose(self) -> list[Group]:
        """Let all collectives raise from now on; return what they went through."""
        return [inner for inner in (self.row.lose(), self.column.lose()) if inner is not None]
