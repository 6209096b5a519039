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
    # Not in the strategy: a module's `optimizer_step` may run the closure before it calls that, and give it none.
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    before, optimizer_step = vars(loop).get("_optimizer_step"), loop._optimizer_step

    def checked_step(batch_idx: int, closure: Callable[[], Any]) -> None:
        optimizer_step(batch_idx, check(closure))

    def undo() -> None:
        vars(loop).pop("_optimizer_step", None)
        if before is not None:
            loop._optimizer_step = before

    loop._optimizer_step = checked_step
    return undo
