"""Turns a checkpoint taken between two batches into one that a resumed run continues rightly.

Lightning tells from its counters where a checkpoint was taken, and knows the hooks in which ``ModelCheckpoint`` saves. A
stop is elsewhere: after a batch is through, before or within a validation, between two epochs.
"""

from typing import Any

from lightning.pytorch import Trainer

from lightning_ft.loops.saved_positions import drop_positions


def settle_counters(checkpoint: dict[str, Any], trainer: Trainer, *, validation_due: bool) -> None:
    """Change the loops' counters in ``checkpoint``.

    Args:
        checkpoint: What ``trainer`` dumped.
        trainer: Where it stopped; left as it is.
        validation_due: Whether the validation after the last batch was not completed: the resumed run begins with it.

    """
    loops = checkpoint["loops"]["fit_loop"]
    if validation_due:
        _begin_validation(loops["epoch_loop.val_loop.batch_progress"])
        return
    epochs: Any = trainer.fit_loop.epoch_progress.current
    is_between_epochs = epochs.processed == epochs.ready
    if is_between_epochs:
        _begin_epoch(loops)
        if not trainer.fit_loop._iteration_based_training():
            return
    if _passes_over_validation(trainer, is_between_epochs):
        # As if this batch's validation had just ended; then it counts the step once more.
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _passes_over_validation(trainer: Trainer, is_between_epochs: bool) -> bool:
    """Whether the resumed run will find itself at a batch that validation follows."""
    fetcher, epoch_loop = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop
    is_timed = getattr(trainer, "_val_check_time_interval", None) is not None  # by a clock that starts with the run
    if fetcher is None or is_timed or trainer.should_stop:
        return False
    progress = epoch_loop.batch_progress
    now = progress.current.ready, progress.is_last_batch
    try:
        if is_between_epochs:
            progress.current.ready, progress.is_last_batch = 0, False
        return epoch_loop._should_check_val_fx(fetcher)
    finally:
        progress.current.ready, progress.is_last_batch = now


def _begin_validation(progress: dict[str, Any]) -> None:
    """As in the first batch of a validation: the only place from which Lightning goes back to run all of it."""
    progress["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    total = progress["total"]
    total["processed"] = total["completed"]
    total["ready"] = total["started"] = total["completed"] + 1
    progress["is_last_batch"] = False


def _begin_epoch(loops: dict[str, Any]) -> None:
    """As at the beginning of the next epoch: with ``max_steps``, Lightning would take up the old one again."""
    drop_positions(loops)
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    for name, progress in loops.items():
        if name.startswith("epoch_loop.") and not name.startswith("epoch_loop.val_loop") and name.endswith("_progress"):
            _zero_current(progress)


def _zero_current(progress: dict[str, Any]) -> None:
    for name, value in progress.items():
        if name == "current":
            progress[name] = dict.fromkeys(value, 0)
        elif isinstance(value, dict):
            _zero_current(value)
