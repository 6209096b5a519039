"""What must be the same on all ranks within an optimizer step, and is not by itself."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.errors import UnusedParametersError


def check_all_used(module: Module, unused: Collection[Parameter]) -> None:
    """Fail if a parameter that is to be trained got no gradient on some rank; ``unused`` is the same on all ranks.

    Raises:
        UnusedParametersError: With the names.

    """
    if unused:
        names = [name for name, parameter in module.named_parameters() if parameter in unused and parameter.requires_grad]
        if names:
            raise UnusedParametersError(names)


def check_step_output(pl_module: LightningModule | None, output: STEP_OUTPUT) -> STEP_OUTPUT:
    """Return what a training step of a sharded module returned.

    Raises:
        MisconfigurationException: If that is None: the other ranks of the replica would wait for its backward pass.

    """
    if output is None and pl_module is not None and pl_module.automatic_optimization:
        raise MisconfigurationException(
            "`training_step` returned None under `FTStrategy(shard_size=...)`: the ranks of a replica run each backward pass"
            " together. Return a loss that does not count, such as `0.0 * loss`, or use `FTStrategy(shard_size=1)`."
        )
    return output


def agree_on_loss(closure: Callable[[], Any], collectives: Collectives) -> Callable[[], Any]:
    """Return a closure that returns the mean of the losses of all ranks.

    For optimizers that decide by the loss: where each rank goes by its own, as under ``ddp``, ranks take steps of
    different lengths, or one of them calls the closure again and waits for the others for ever.
    """

    def agreed() -> Any:
        loss = closure()
        if loss is None:  # on all ranks: no gradient counts, which LBFGS takes for having arrived
            return torch.zeros(())
        mean = collectives.mean(loss if isinstance(loss, Tensor) else torch.tensor(loss))
        return mean if isinstance(loss, Tensor) else mean.item()

    return agreed
