"""Saves a checkpoint directory while the Trainer waits: what ``trainer.save_checkpoint`` does with a directory's path."""

import os
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer

from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.peers import Peers
from lightning_ft.checkpoint.store_path import place
from lightning_ft.errors import CheckpointNotCommittedError
from lightning_ft.trainer.checkpoint_content import content_of


def wants_directory(path: _PATH) -> bool:
    """Whether a checkpoint at this path is to be a directory."""
    return os.fspath(path).endswith("/") or place(path).is_dir()


def save_directory(trainer: Trainer, checkpoint: dict[str, Any], path: _PATH, peers: Peers) -> None:
    """Collective. Save ``checkpoint``; return once it is there as a whole. If a rank dies in it, the others begin anew.

    Args:
        trainer: Whose state it is.
        checkpoint: What it dumped.
        path: Where; a checkpoint that is there is replaced once this one is whole.
        peers: The ranks.

    Raises:
        CheckpointNotCommittedError: If that fails.

    """
    run_id = str(getattr(getattr(trainer.strategy, "engine", None), "run_id", ""))
    content, may_change = content_of(trainer, checkpoint, run_id)
    saver = AsyncSaver(peers)
    try:
        while True:
            try:
                saver.save(place(path), content, may_change=may_change).wait()
                return
            except CheckpointNotCommittedError as error:
                if not error.because_of_death:
                    raise
    finally:
        saver.close()
