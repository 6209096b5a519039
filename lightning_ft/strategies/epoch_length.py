"""Keeps Lightning's idea of how long the epoch is equal to what the tickets say.

An epoch has more steps while a rank is missing and fewer once it is back, and Lightning decides by its length when to
validate, when a window of accumulation ends early and when the epoch is over.
"""

from lightning.pytorch import Trainer

from lightning_ft.data.streams import StreamLoader
from lightning_ft.strategies.training_data import TrainLoader


def set_length_while_fetching(trainer: Trainer, loader: TrainLoader) -> None:
    """Set the length in the middle of the fetcher's step to a new batch, before it counts that batch."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None:
        return
    remaining = loader.remaining_steps
    fetcher.length = fetcher.fetched + 1 + remaining
    _set_batches(trainer, loader, trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1, remaining)


def set_length(trainer: Trainer, loader: TrainLoader) -> None:
    """Set the length after the membership changed under a batch, or between two batches."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None:
        return
    progress = trainer.fit_loop.epoch_loop.batch_progress
    remaining = loader.remaining_steps
    fetcher.length = fetcher.fetched + remaining
    fetcher.done = remaining == 0
    _set_batches(trainer, loader, progress.current.ready, remaining)
    if trainer.training and progress.current.ready > progress.current.completed:
        progress.is_last_batch = remaining == 0


def set_length_of_resumed(trainer: Trainer, loader: TrainLoader) -> None:
    """Set the length when a fit resumes in an epoch that may have taken more batches already than it is planned to have."""
    ready, remaining = trainer.fit_loop.epoch_loop.batch_progress.current.ready, loader.remaining_steps
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or not ready or not remaining or loader.plan.epoch != trainer.current_epoch:
        return
    fetcher.length = ready + remaining  # Lightning adds those that are ready to what it fetched
    _set_batches(trainer, loader, ready, remaining)


def _set_batches(trainer: Trainer, loader: TrainLoader, ready: int, remaining: int) -> None:
    num_batches = ready + remaining
    if isinstance(loader, StreamLoader):
        if loader.expected_steps is None:
            return  # endless for Lightning, which then goes by whether a batch is the last one
        if remaining:  # one more at least
            num_batches = max(num_batches, loader.expected_steps)
    trainer.fit_loop.max_batches = num_batches
    if trainer.val_check_interval == 1.0 and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, num_batches)
