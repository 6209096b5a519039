"""A save that a checkpoint callback began, and what its bookkeeping was before, in case the save fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_ft.checkpoint.pending_save import PendingSave
from lightning_ft.trainer.known_checkpoints import rank_models


@dataclass
class BegunSave:
    """A save, and what ModelCheckpoint knew before it.

    Args:
        pending: The save.
        filepath: Of the checkpoint.
        is_last: Whether it is that of ``save_last``.
        replaced: Checkpoints that go once it is there.
        best_k_models: What there was.
        best_model_path: Which was the best.
        last_model_path: Which was the last.
        taken_back: Whether the bookkeeping forgot it.

    """

    pending: PendingSave
    filepath: str
    is_last: bool
    replaced: list[str]
    best_k_models: dict[str, Tensor]
    best_model_path: str
    last_model_path: str
    taken_back: bool = False

    def take_back(self, callback: ModelCheckpoint, later: Iterable[BegunSave] = ()) -> None:
        """If it failed, have ``callback`` forget it, and know again the checkpoints that it was to replace.

        Args:
            callback: Whose bookkeeping it is.
            later: Saves that were begun after it. One that replaces it replaces now what it was to replace.

        """
        if self.taken_back or self.pending.error is None:
            return
        self.taken_back = True
        later = list(later)
        is_replaced = any([save._inherit(self) for save in later])
        if any(save.filepath == self.filepath for save in later):
            return
        for old in () if is_replaced else self.replaced:
            if old in self.best_k_models:
                callback.best_k_models[old] = self.best_k_models[old]
        callback.best_k_models.pop(self.filepath, None)
        rank_models(callback)
        if not callback.best_k_models and callback.best_model_path == self.filepath:
            callback.best_model_path = self.best_model_path
            callback.kth_best_model_path = ""
        if callback.last_model_path == self.filepath:
            callback.last_model_path = self.last_model_path
        if callback._last_checkpoint_saved == self.filepath:
            callback._last_checkpoint_saved = ""
            callback._last_global_step_saved = 0

    def _inherit(self, failed: BegunSave) -> bool:
        """Forget an earlier save, and replace what it was to replace if this one was to replace it; return whether."""
        if self.best_model_path == failed.filepath:
            self.best_model_path = failed.best_model_path
        if self.last_model_path == failed.filepath:
            self.last_model_path = failed.last_model_path
        if failed.filepath not in self.replaced:
            return False
        self.replaced = [*(path for path in self.replaced if path != failed.filepath), *failed.replaced]
        for old in failed.replaced:
            if old in failed.best_k_models:
                self.best_k_models[old] = failed.best_k_models[old]
        return True


def link(filepath: str, linkpath: str) -> None:
    """Make ``linkpath`` a link to a checkpoint, in place of what is there."""
    if os.path.abspath(filepath) == os.path.abspath(linkpath):
        return
    temporary = f"{linkpath}.link"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), temporary)
    if os.path.isdir(linkpath) and not os.path.islink(linkpath):
        shutil.rmtree(linkpath)
    os.replace(temporary, linkpath)
