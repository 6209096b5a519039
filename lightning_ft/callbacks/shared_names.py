"""Finds callbacks that would save over each other's checkpoints."""

import os
from collections.abc import Iterable

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_names(callback: ModelCheckpoint, others: Iterable[Checkpoint]) -> None:
    """Refuse callbacks of another kind that save under the same names: they don't know of saves under way.

    Args:
        callback: Whose saves take time.
        others: Those of other kinds of the Trainer.

    Raises:
        MisconfigurationException: If there is one.

    """
    for other in others:
        if not isinstance(other, ModelCheckpoint) or not other.dirpath:
            continue
        same = _templates(callback) & _templates(other)
        if same and os.path.realpath(other.dirpath) == os.path.realpath(str(callback.dirpath)):
            raise MisconfigurationException(
                f"`{type(callback).__name__}` and `{type(other).__name__}` both save `{min(same)}` in {other.dirpath}: one"
                " would replace what the other saved. Give one of them another `filename` or `dirpath`."
            )


def _templates(callback: ModelCheckpoint) -> set[str]:
    named = {callback.filename or "{epoch}-{step}"} if callback.save_top_k != 0 else set()
    return named | ({callback.CHECKPOINT_NAME_LAST} if callback.save_last else set())
