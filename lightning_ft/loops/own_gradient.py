"""The norm of what a rank itself contributes to an average of gradients, seen before it is averaged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_ft.rerun.gradient_norm import norm_of

T = TypeVar("T")


class OwnGradient:
    """Measures each gradient as soon as backward has added to it, which is before any strategy averages it.

    Args:
        pl_module: Its parameters; where they are sharded no rank has a gradient of its own.

    """

    def __init__(self, pl_module: LightningModule) -> None:
        self._pl_module = pl_module
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._norms: dict[Parameter, Tensor] = {}
        self._is_measuring = False

    def close(self) -> None:
        """Take the hooks off the parameters. May be called twice."""
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
        self._follow()
        self._norms.clear()
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False

    @property
    def norm(self) -> Tensor | None:
        """The norm of the step's gradients that its last pass added to; None if it added to none."""
        return torch.stack(list(self._norms.values())).norm() if self._norms else None

    def _follow(self) -> None:
        """Parameters may be unfrozen or added."""
        for parameter in self._pl_module.parameters():
            if parameter.requires_grad and parameter not in self._handles and not isinstance(parameter, DTensor):
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_measuring and parameter.grad is not None:
            assert isinstance(parameter, Parameter)
            self._norms[parameter] = norm_of(parameter.grad)
