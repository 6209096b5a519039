"""Tells when the steps of a module begin and what they return, whoever calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule


class WatchedSteps:
    """Stands around the steps of a module until it is closed.

    Args:
        pl_module: The module.
        names: Names of its steps.
        before: Called with the arguments of a step.
        after: Called with its name and what it returned.

    """

    def __init__(
        self,
        pl_module: LightningModule,
        names: tuple[str, ...],
        before: Callable[..., None],
        after: Callable[[str, Any], None],
    ) -> None:
        self._undo = [_watch(pl_module, name, before, after) for name in names]

    def close(self) -> None:
        """Leave the module as it was. May be called twice."""
        while self._undo:
            self._undo.pop()()


def _watch(
    pl_module: LightningModule, name: str, before: Callable[..., None], after: Callable[[str, Any], None]
) -> Callable[[], None]:
    step, is_own = getattr(pl_module, name), name in vars(pl_module)

    @wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        output = step(*args, **kwargs)
        after(name, output)
        return output

    def undo() -> None:
        if vars(pl_module).get(name) is watched:  # else somebody else stands around this one
            delattr(pl_module, name)
            if is_own:
                setattr(pl_module, name, step)

    setattr(pl_module, name, watched)
    return undo
