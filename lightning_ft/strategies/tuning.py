"""The learning rate finder, which trains within a hook of the training it is for.

The ranks search together, but nobody joins in the middle of it: a rank that comes back leaves the search out and takes
over what was found.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRCallback, _LRFinder
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


def found(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return what the finders found, and the learning rates of ``module`` that they may have set, by attribute."""
    names = [_determine_lr_attr_name(module, finder._attr_name) for finder in finders(trainer) if finder._update_attr]
    return {
        "results": [None if finder.optimal_lr is None else vars(finder.optimal_lr) for finder in finders(trainer)],
        "rates": [(name, lightning_getattr(module, name)) for name in names],
    }


def adopt(trainer: Trainer, module: LightningModule | None, state: dict[str, Any]) -> None:
    """Set what :func:`found` returned in another rank."""
    for finder, result in zip(finders(trainer), state["results"], strict=True):
        if result is not None:
            finder.optimal_lr = _LRFinder.__new__(_LRFinder)
            vars(finder.optimal_lr).update(result)
    if module is not None:
        for name, rate in state["rates"]:
            lightning_setattr(module, name, rate)


def finders(trainer: Trainer) -> list[LearningRateFinder]:
    """Return the callbacks that search."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, LearningRateFinder)]
