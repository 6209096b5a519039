"""The norm of averaged gradients, measured as they are written."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from lightning_ft.rerun.gradient_norm import TotalNorm


class AverageNorm:
    """The norm of one average, as long as gradients are what was averaged."""

    def __init__(self) -> None:
        self.total = TotalNorm()
        """Of what was written."""
        self._gradients: dict[Parameter, tuple[Tensor, int]] = {}

    def forget(self) -> None:
        """Begin with another average."""
        self.total.clear()
        self._gradients.clear()

    def is_of(self, parameters: Sequence[Parameter]) -> None:
        """Note that what was measured is now all that is in the gradients of ``parameters``."""
        if self.total.value is not None:
            dense = {p: p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse}
            self._gradients = {p: (gradient, gradient._version) for p, gradient in dense.items()}
            if len(dense) < len(parameters):
                self.forget()

    def take(self, parameters: Iterable[Parameter]) -> Tensor | None:
        """Return, once, the norm of the gradients of ``parameters``; None unless they all are what was averaged."""
        known = [
            parameter in self._gradients
            and gradient is self._gradients[parameter][0]
            and gradient._version == self._gradients[parameter][1]  # else a hook after backward changed it in place
            for parameter, gradient in ((p, p.grad) for p in parameters)
            if gradient is not None
        ]
        norm = self.total.value if all(known) and len(known) == len(self._gradients) else None
        self.forget()  # gradients take memory, which is to be free when they are set to None
        return norm
