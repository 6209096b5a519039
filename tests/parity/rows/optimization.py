"""Optimizers, schedulers, clipping, accumulation, precision."""

from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from row import CLIPPED, Net, Row
from torch.optim import SGD, Adam, lr_scheduler


class Optimized(Net):
    """A module with another optimizer, and perhaps a scheduler."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(self)


def optimized(make: Any) -> Any:
    return lambda: Optimized(make)


def scheduled(make: Any, **config: Any) -> Any:
    """A module with SGD and a scheduler."""

    def configure(module: Net) -> Any:
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer, module), **config}}

    return optimized(configure)


ROWS = [
    Row("adamw"),
    Row("sgd", optimized(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True))),
    Row("adam", optimized(lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True))),
    Row("step scheduler by epoch", scheduled(lambda o, m: lr_scheduler.StepLR(o, 1, 0.5))),
    Row("step scheduler by step", scheduled(lambda o, m: lr_scheduler.StepLR(o, 2, 0.5), interval="step", frequency=2)),
    Row("warm-up", scheduled(lambda o, m: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 5)), interval="step")),
    Row("plateau", scheduled(lambda o, m: lr_scheduler.ReduceLROnPlateau(o, patience=0), monitor="val_loss")),
    Row(
        "plateau by step",
        scheduled(
            lambda o, m: lr_scheduler.ReduceLROnPlateau(o, patience=0), interval="step", frequency=2, monitor="loss_step"
        ),
    ),
    Row(
        "one cycle",
        scheduled(
            # While a rank is missing an epoch has more steps: room for those.
            lambda o, m: lr_scheduler.OneCycleLR(o, 0.1, total_steps=2 * int(m.trainer.estimated_stepping_batches)),
            interval="step",
        ),
    ),
    Row("clipping by norm", trainer={"gradient_clip_val": 0.1}, sharded=CLIPPED),
    Row("clipping by value", trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Row("accumulation", trainer={"accumulate_grad_batches": 2}, kill={"step": 2}),
    Row("accumulation with a rest", trainer={"accumulate_grad_batches": 4, "max_epochs": 3}),
    Row("accumulation by schedule", callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]),
    Row("bf16-mixed", trainer={"precision": "bf16-mixed"}),
    Row("bf16-true", trainer={"precision": "bf16-true"}),
    Row("64-true", trainer={"precision": "64-true"}),
    Row("no scheduler, fused off", optimized(lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, foreach=True))),
]
