"""Finds out who saves together with this rank, under any strategy."""

import secrets
from typing import Any

from lightning.pytorch import Trainer

from lightning_ft.checkpoint._torch_compat import default_store
from lightning_ft.checkpoint.peers import Peers, SoloPeers, StorePeers


def agree_on_run_id(trainer: Trainer) -> str:
    """Collective. Return what tells this run from others."""
    engine: Any = getattr(trainer.strategy, "engine", None)
    return str(getattr(engine, "run_id", "") or trainer.strategy.broadcast(secrets.token_hex(8)))


def peers_of(trainer: Trainer, run_id: str) -> Peers:
    """Return the ranks of ``trainer``."""
    own = getattr(trainer.strategy, "checkpoint_peers", None)
    if own is not None:
        return own()  # type: ignore[no-any-return]
    if trainer.world_size == 1:
        return SoloPeers()
    return StorePeers(default_store(), trainer.global_rank, trainer.world_size, run_id)
