"""The live ranks as those who save checkpoints together: who dies meanwhile is not waited for."""

import secrets
from datetime import timedelta

from lightning_ft.checkpoint.peers import Peers, Roll, SoloPeers, StorePeers
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.local import LocalEngine

_TIMEOUT = timedelta(seconds=60)


def checkpoint_peers(engine: Engine, collectives: Collectives) -> Peers:
    """Return those with whom a rank saves checkpoints."""
    return ElasticPeers(engine, collectives) if isinstance(engine, LocalEngine) else SoloPeers()


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
        """Collective. Take part with all who live; after an exception that ended the training, only rank 0 saves."""
        engine = self._engine
        if engine.alone:
            return None if engine.rank > 0 else Roll(secrets.token_hex(6), Seat(0, 1))
        live = engine.live()
        processes = tuple((slot, live.get(slot, -1)) for slot in engine.members)
        token, processes = self._collectives.broadcast_object((secrets.token_hex(6), processes))
        position = [slot for slot, _ in processes].index(engine.slot)
        return Roll(token, Seat(position, len(processes)), processes)

    def lost(self, roll: Roll) -> frozenset[int]:
        live = self._engine.live()
        return frozenset(rank for rank, (slot, incarnation) in enumerate(roll.ids) if live.get(slot) != incarnation)
