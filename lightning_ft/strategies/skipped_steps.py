"""Lets ``training_step`` return None on some ranks, or on all, as Lightning lets it on a single device.

Under ``ddp`` that is refused, since the others would wait for this rank's gradients for ever. Here a rank that skips takes
part in the reduction with weight 0.
"""

from collections import OrderedDict
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer import call


def allow_skipped_steps(trainer: Trainer) -> None:
    """Keep Lightning from refusing None."""

    def training_step(kwargs: "OrderedDict[str, Any]") -> ClosureResult:
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)

    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    loop._training_step = training_step  # type: ignore[method-assign]
