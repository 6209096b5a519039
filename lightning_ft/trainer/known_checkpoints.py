"""What a ModelCheckpoint knows of its files, when it can't be what it would have become by itself."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_ft.checkpoint.store_path import place
from lightning_ft.errors import StoreUnreachableError


def rank_models(callback: ModelCheckpoint) -> None:
    """Find the best and the worst of ``best_k_models`` again, if there are any."""
    if callback.best_k_models:
        best, worst = (min, max) if callback.mode == "min" else (max, min)
        score = callback.best_k_models.__getitem__
        callback.kth_best_model_path = worst(callback.best_k_models, key=score)
        callback.kth_value = score(callback.kth_best_model_path)
        callback.best_model_path = best(callback.best_k_models, key=score)
        callback.best_model_score = score(callback.best_model_path)


class KnownCheckpoints:
    """Collective. What a checkpoint callback knows of files, across a return of the training to an earlier state.

    What it saved since is there, and what that replaced is not any more. If it went back too, it would forget the one, never
    to remove or replace it, and take the other for there.

    Args:
        trainer: Whose callback it is; its saves are finished.
        callback: As it is now.
        states: Those of callbacks, that the training returns to.

    """

    def __init__(self, trainer: Trainer, callback: ModelCheckpoint, states: Mapping[str, Any]) -> None:
        self._callback = callback
        before = states.get(callback.state_key, {})
        models: dict[str, Tensor] = {**before.get("best_k_models", {}), **callback.best_k_models}
        best = [callback.best_model_path, before.get("best_model_path", "")]
        last = [callback.last_model_path, before.get("last_model_path", "")]
        asked = {path for path in (*models, *best, *last) if path}
        there = trainer.strategy.broadcast(sorted(filter(_is_there, asked)) if trainer.is_global_zero else [])
        self._models = {path: score for path, score in models.items() if path in there}
        self._best = next((path for path in best if path in there), "")
        self._last = next((path for path in last if path in there), "")

    def restore(self) -> None:
        """Have the callback, which was taken back, know of what is there."""
        callback = self._callback
        ranked = sorted(self._models, key=self._models.__getitem__, reverse=callback.mode == "max")
        kept = ranked if callback.save_top_k == -1 else ranked[: callback.save_top_k]
        callback.best_k_models = {path: score for path, score in self._models.items() if path in kept}
        callback.best_model_path, callback.last_model_path = self._best, self._last
        callback.kth_best_model_path = ""
        rank_models(callback)


def _is_there(path: str) -> bool:
    with suppress(StoreUnreachableError, OSError):
        return place(path).exists()
    return True  # nobody knows
