"""Callbacks; those of Lightning's users go to ``Trainer(callbacks=[...])``, with any strategy that they name."""

from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.callbacks.loader_position import LoaderPosition
from lightning_ft.callbacks.replica_checksums import ReplicaChecksums
from lightning_ft.callbacks.rerun_validation import RerunValidation
from lightning_ft.callbacks.tensor_dump import TensorDump
from lightning_ft.callbacks.training_health import TrainingHealth
from lightning_ft.loops.rolling_replay import ReplayOptions

__all__ = [
    "AsyncCheckpoint",
    "LoaderPosition",
    "ReplayOptions",
    "ReplicaChecksums",
    "RerunValidation",
    "TensorDump",
    "TrainingHealth",
]
