"""Checkpoints that are there whole or not at all, and how they are found, checked and read; without Lightning."""

from lightning_ft.checkpoint.pending_save import PendingSave
from lightning_ft.checkpoint.process_saver import wait_for_copy
from lightning_ft.checkpoint.training_metadata import TrainingMetadata, load_training_metadata
from lightning_ft.checkpoint.training_state import (
    async_save_training_state,
    load_sharded,
    load_training_state,
    save_frozen_training_state,
    save_sharded,
    save_training_state,
)

__all__ = [
    "PendingSave",
    "TrainingMetadata",
    "async_save_training_state",
    "load_sharded",
    "load_training_metadata",
    "load_training_state",
    "save_frozen_training_state",
    "save_sharded",
    "save_training_state",
    "wait_for_copy",
]
