"""Steps that give ranks time to come back, where faults are to meet those that did."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ft.testing import FaultPlan


class WaitsForFaults(Callback):
    """After the first fault each step takes half a second more as long as one of a process that comes later has not fired.

    Where nobody holds the others (``min_replicas``), they may be through before a rank is back if the machine is busy.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        (plan,) = [callback for callback in trainer.callbacks if isinstance(callback, FaultPlan)]
        later = [index for index, fault in enumerate(plan.faults) if fault.incarnation]
        until = time.monotonic() + 0.5
        while plan.has_fired(0) and not all(map(plan.has_fired, later)) and time.monotonic() < until:
            time.sleep(0.01)
