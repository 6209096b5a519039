"""The learning rate finder, which trains within a hook of the training it is for.

The ranks search together, but nobody joins in the middle of it: a rank that comes back leaves the search out and takes
over what was found.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRCallback
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr


def is_searching(trainer: Trainer) -> bool:
    """Whether the batches that are trained now are those of a search."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def leave_out(trainer: Trainer) -> None:
    """Have the finders search for nothing in this rank, until :func:`take_part`."""
    for finder in finders(trainer):
        finder.lr_find = lambda trainer, pl_module: None  # type: ignore[method-assign]


def take_part(trainer: Trainer) -> None:
    """Have the finders search from now on, those that do it again and again."""
    for finder in finders(trainer):
        vars(finder).pop("lr_find", None)


def found(trainer: Trainer, module: LightningModule) -> list[tuple[str, Any]]:
    """Return the learning rates of ``module`` that the finders may have set, by attribute."""
    names = [_determine_lr_attr_name(module, finder._attr_name) for finder in finders(trainer) if finder._update_attr]
    return [(name, lightning_getattr(module, name)) for name in names]


def adopt(module: LightningModule, rates: list[tuple[str, Any]]) -> None:
    """Set what :func:`found` returned in another rank."""
    for name, rate in rates:
        lightning_setattr(module, name, rate)


def finders(trainer: Trainer) -> list[LearningRateFinder]:
    """Return the callbacks that search."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, LearningRateFinder)]
