"""Turns a checkpoint taken between two batches into one that a resumed run continues rightly.

Lightning tells from its counters where a checkpoint was taken, and knows the hooks in which ``ModelCheckpoint`` saves. A
stop is elsewhere: after a batch is through, before or within a validation, between two epochs.
"""

from typing import Any

from lightning.pytorch import Trainer


def settle_counters(checkpoint: dict[str, Any], trainer: Trainer, *, validation_due: bool) -> None:
    """Change the loops' counters in ``checkpoint``.

    Args:
        checkpoint: What ``trainer`` dumped.
        trainer: Where it stopped; left as it is.
        validation_due: Whether the validation after the last batch was not completed: the resumed run begins with it.

    """
    loops = checkpoint["loops"]["fit_loop"]
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if validation_due:
        _begin_validation(loops["epoch_loop.val_loop.batch_progress"])
    elif epochs.processed == epochs.ready:
        _begin_epoch(loops)
    elif _is_validated(trainer):
        # The resumed run passes over this batch's validation as if it had just ended, and counts the step once more.
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _is_validated(trainer: Trainer) -> bool:
    fetcher = trainer.fit_loop._data_fetcher
    is_timed = getattr(trainer, "_val_check_time_interval", None) is not None  # by a clock that starts with the run
    return fetcher is not None and not is_timed and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _begin_validation(progress: dict[str, Any]) -> None:
    """As in the first batch of a validation: the only place from which Lightning goes back to run all of it."""
    progress["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    total = progress["total"]
    total["processed"] = total["completed"]
    total["ready"] = total["started"] = total["completed"] + 1
    progress["is_last_batch"] = False


def _begin_epoch(loops: dict[str, Any]) -> None:
    """As at the beginning of the next epoch: with ``max_steps``, Lightning would take up the old one again."""
    loops["state_dict"].pop("combined_loader", None)
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
