"""The moment of a step when its gradients are final and nothing of it is applied, under any strategy."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

Check = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Gets what runs the last pass of a step; returns what is to run in its place."""


def check_gradients_with(trainer: Trainer, check: Check) -> Callable[[], None]:
    """Have ``check`` wrap what runs the last pass of each step; return what undoes it."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "check_gradients_with"):
        strategy.check_gradients_with(check)
        return lambda: None
    before, optimizer_step = vars(strategy).get("optimizer_step"), strategy.optimizer_step

    def checked_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return optimizer_step(optimizer, check(closure), *args, **kwargs)

    def undo() -> None:
        vars(strategy).pop("optimizer_step", None)
        if before is not None:
            strategy.optimizer_step = before

    strategy.optimizer_step = checked_step
    return undo
