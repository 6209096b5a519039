"""The norm of what a rank itself contributes to an average of gradients, seen before it is averaged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_ft.rerun.gradient_norm import TotalNorm

T = TypeVar("T")


class OwnGradient:
    """Measures gradients before any strategy averages them.

    FTStrategy measures them as it sends them, and keeps them until they are averaged. Under others each is measured as soon
    as backward has added to it.

    Args:
        trainer: The trainer, in a fit.
        pl_module: Its parameters; where they are sharded no rank has a gradient of its own.

    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pl_module = pl_module
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._norms: dict[Parameter, TotalNorm] = {}
        self._sent: Tensor | None = None
        self._is_measuring = False
        self._is_over = False
        is_sharded = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
        look_with = getattr(trainer.strategy, "look_at_own_gradients_with", None)
        self._look_with: Callable[[Callable[[Tensor | None], None] | None], None] | None = None if is_sharded else look_with
        if self._look_with is not None:
            self._look_with(self._look)

    def close(self) -> None:
        """Take the hooks off. May be called twice."""
        if self._look_with is not None:
            self._look_with(None)
            self._look_with = None
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._norms.clear()

    def measuring(self, last_pass: Callable[[], T]) -> Callable[[], T]:
        """Return what runs the last pass of a step and measures in it."""

        def measured() -> T:
            with self.measured():
                return last_pass()

        return measured

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure in the pass inside, which is the last one of a step."""
        if self._look_with is None:
            self._follow()
        self._norms.clear()
        self._sent = None
        self._is_measuring, self._is_over = True, False
        try:
            yield
            if self._look_with is not None and not self._is_over:
                self._look(None)  # nothing was averaged
        finally:
            self._is_measuring = False

    @property
    def norm(self) -> Tensor | None:
        """The norm of the step's gradients; None if there are none.

        Where each is measured after backward: of those that the last pass added to.
        """
        if self._sent is not None:
            return self._sent
        return TotalNorm(self._norms.values()).value

    def _follow(self) -> None:
        """Parameters may be unfrozen or added."""
        for parameter in self._pl_module.parameters():
            if parameter.requires_grad and parameter not in self._handles and not isinstance(parameter, DTensor):
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _look(self, sent: Tensor | None) -> None:
        if self._is_measuring:
            self._sent = sent
            for parameter in self._pl_module.parameters() if sent is None else ():
                if parameter.requires_grad:
                    self._measure(parameter)
            self._is_over = True

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_measuring:
            assert isinstance(parameter, Parameter)
            self._measure(parameter)

    def _measure(self, parameter: Parameter) -> None:
        if parameter.grad is not None:
            self._norms[parameter] = TotalNorm()
            self._norms[parameter].add(parameter.grad)
