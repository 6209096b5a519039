"""How long checkpoints keep a training waiting, whichever callback saves them and under whichever strategy."""

import functools
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

_NOT_TIMED = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")


class CheckpointTime:
    """A stopwatch that runs while checkpoint callbacks, or ``trainer.save_checkpoint``, have the training thread.

    Args:
        trainer: Whose.

    """

    def __init__(self, trainer: Trainer) -> None:
        self.seconds = 0.0
        self._is_running = False
        self._timed: list[tuple[Any, str]] = []
        self._time(trainer, "save_checkpoint")
        for callback in trainer.checkpoint_callbacks:
            for name in _own_hooks(callback):
                self._time(callback, name)

    def close(self) -> None:
        """Take the stopwatch away. May be called twice."""
        for owner, name in self._timed:
            vars(owner).pop(name, None)
        self._timed = []

    def _time(self, owner: Any, name: str) -> None:
        if name in vars(owner):  # somebody else put something there, and will take it away
            return
        setattr(owner, name, self._timing(getattr(owner, name)))
        self._timed.append((owner, name))

    def _timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._is_running, since = True, time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_running = False
                self.seconds += time.monotonic() - since

        return timed


def _own_hooks(callback: Any) -> list[str]:
    """Return the names of the hooks that a callback has, and of what its optimizers wait for."""
    kind = type(callback)
    names = [name for name in dir(Callback) if name.startswith("on_") and name not in _NOT_TIMED]
    names = [name for name in names if getattr(kind, name) is not getattr(Callback, name)]
    return [*names, "wait_for_copy"] if hasattr(kind, "wait_for_copy") else names
