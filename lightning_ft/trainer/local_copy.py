"""Checkpoints of stores, for strategies that read file systems only."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_ft.checkpoint.dcp_reading import content_directory
from lightning_ft.checkpoint.store_path import StorePath, place
from lightning_ft.checkpoint.temporary_copies import hold, make_directory


@contextmanager
def readable(trainer: Trainer, path: str) -> Iterator[str]:
    """Collective. Have a checkpoint's directory where the strategy can read it: as it is, or copied for as long.

    Args:
        trainer: Whose strategy reads it.
        path: The checkpoint.

    """
    where, strategy = place(path), trainer.strategy
    reads_itself = type(strategy).load_checkpoint is not Strategy.load_checkpoint
    reads_stores = hasattr(strategy, "checkpoint_peers")
    if not isinstance(where, StorePath) or not reads_itself or reads_stores or not where.is_dir():
        yield path
        return
    copy = strategy.broadcast(make_directory() if trainer.is_global_zero else "")
    release = hold(copy)
    try:
        if trainer.local_rank == 0:
            _copy(where, Path(copy))
        strategy.barrier()
        yield copy
        strategy.barrier()
    finally:
        if trainer.local_rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
        release()


def _copy(source: StorePath, target: Path) -> None:
    target.mkdir(exist_ok=True)
    content = content_directory(source)
    assert isinstance(content, StorePath)
    for entry in content.entries():
        if not entry.is_directory:
            with entry.path.open() as reading, open(target / entry.path.name, "wb") as writing:
                shutil.copyfileobj(reading, writing, 8 << 20)
