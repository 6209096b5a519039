"""The live ranks as those who save checkpoints together: who dies meanwhile is not waited for."""

import logging
import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ft.checkpoint.peers import Peers, Roll, SoloPeers, StorePeers
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.local import LocalEngine

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=60)


def checkpoint_peers(engine: Engine, collectives: Collectives) -> Peers:
    """Return those with whom a rank saves checkpoints."""
    return ElasticPeers(engine, collectives) if isinstance(engine, LocalEngine) else SoloPeers()


def holds_whole_state(engine: Engine) -> bool:
    """Whether the ranks of this replica still save together; that they do not after an exception is told."""
    whole = engine.replica.size == 1 or not engine.alone or engine.shard_group.is_connected
    if not whole and engine.rank == 0:
        log.warning("Nothing is saved: an exception ended the training, and no rank has the whole state by itself.")
    return whole


class ElasticPeers(StorePeers):
    """Ranks that may die and come back.

    Args:
        engine: Knows who lives.
        collectives: Of the live ranks.

    """

    def __init__(self, engine: LocalEngine, collectives: Collectives) -> None:
        super().__init__(engine.connect(_TIMEOUT), engine.slot, engine.num_slots, engine.run_id)
        self._engine = engine
        self._collectives = collectives

    def enroll(self) -> Roll | None:
        """Collective. Take part with all who live; after the call, and after an exception in it, only the first replica."""
        engine, replica = self._engine, self._engine.replica
        if engine.alone and replica.size == 1:
            return None if engine.rank > 0 else Roll(secrets.token_hex(6), Seat(0, 1))
        if engine.alone:
            return self._enroll_first_replica()
        live = engine.live()
        processes = tuple((slot, live.get(slot, -1)) for slot in engine.members)
        token, processes = self._collectives.broadcast_object((secrets.token_hex(6), processes))
        position = [slot for slot, _ in processes].index(engine.slot)
        return Roll(token, Seat(position, len(processes), replica.index, replica.count), processes)

    def _enroll_first_replica(self) -> Roll | None:
        """Collective in the replica."""
        replica = self._engine.replica
        if replica.index > 0 or not holds_whole_state(self._engine):
            return None
        number = torch.tensor([secrets.randbits(48) if replica.shard == 0 else 0])
        dist.all_reduce(number, group=self._engine.shard_group)
        live = self._engine.live()
        processes = tuple((slot, live.get(slot, -1)) for slot in replica.slots)
        return Roll(f"{number.item():012x}", Seat(replica.shard, replica.size), processes)

    def lost(self, roll: Roll) -> frozenset[int]:
        live = self._engine.live()
        return frozenset(rank for rank, (slot, incarnation) in enumerate(roll.ids) if live.get(slot) != incarnation)
