"""A copy of the training state of exactly one step, taken while the next one computes its gradients.

What only an optimizer changes is copied in a thread, and optimizers wait for it: forward and backward passes do not. All
else is copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ft.checkpoint.copying_checksum import CopyingChecksum
from lightning_ft.errors import FaultToleranceError

Pair = tuple[str, Tensor, Tensor]
"""Name, destination and source."""


class TornSnapshotError(FaultToleranceError, RuntimeError):
    """Values that were to be saved changed while they were copied.

    Args:
        name: Of the first of them.

    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"`{self.name}` was changed in place before the next optimizer step, while it was being copied. Change"
            " parameters and optimizer state in an optimizer's `step`, or call `wait_for_copy()` before."
        )


class Snapshot:
    """A copy under way.

    Args:
        now: Pairs that are copied by the constructor.
        later: Pairs that :meth:`finish` copies; their sources must not change before it is done.

    """

    def __init__(self, now: Sequence[Pair], later: Sequence[Pair]) -> None:
        self._later = later
        self._versions = [_version(source) for _, _, source in later]
        _copy(now)

    def finish(self, checksum: CopyingChecksum | None = None) -> str | None:
        """Copy the rest.

        Args:
            checksum: Of the memory that is copied to.

        Returns:
            The checksum if it was taken on the way: of memory that another device filled it would keep optimizers waiting.

        Raises:
            TornSnapshotError: If a source changed meanwhile.

        """
        value = None
        if checksum is not None and all(source.device.type == "cpu" for _, _, source in self._later):
            with torch.no_grad():
                checksum.copy((destination, source) for _, destination, source in self._later)
            value = checksum.finish()
        else:
            _copy(self._later)
        for (name, _, source), version in zip(self._later, self._versions, strict=True):
            if _version(source) != version:
                raise TornSnapshotError(name)
        self._later = ()
        return value


def _copy(pairs: Sequence[Pair]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([destination for _, destination, _ in pairs], [source for _, _, source in pairs])
        for device in {source.device for _, _, source in pairs}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Fence:
    """Keeps optimizers from changing anything before ``wait`` returns.

    An optimizer that is given a closure evaluates it first, and that is the forward and backward pass: then the wait comes
    after it.

    Args:
        optimizers: Which.
        wait: Called before each step.

    """

    def __init__(self, optimizers: Iterable[Optimizer], wait: Callable[[], None]) -> None:
        self._wait = wait
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close(self) -> None:
        """Let the optimizers go. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        is_keyword = "closure" in kwargs
        closure = kwargs.get("closure") if is_keyword else next(iter(args[1:]), None)
        if closure is None:
            self._wait()
            return None

        def closure_then_wait() -> Any:
            loss = closure()
            self._wait()
            return loss

        if is_keyword:
            return args, {**kwargs, "closure": closure_then_wait}
        return (args[0], closure_then_wait, *args[2:]), kwargs
