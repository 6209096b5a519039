"""What a training step changes beside gradients: buffers, metrics, logged values, random numbers."""

from collections.abc import Collection
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ft.loops.metric_state import blank_state, metric_state, restore_metric


class StepState:
    """All of it, as it is now; each buffer, metric and logged value under a name.

    Args:
        trainer: The trainer.
        pl_module: Its module.

    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self.random: dict[str, Any] = _collect_rng_states(include_cuda=pl_module.device.type == "cuda")
        self._values = _values(trainer, pl_module)
        connector = trainer._logger_connector
        self._place = pl_module._current_fx_name, connector._current_fx, connector._first_loop_iter

    @property
    def names(self) -> set[str]:
        """What it consists of, but for random numbers."""
        return set(self._values)

    def changed(self, later: "StepState | None" = None) -> set[str]:
        """Return the names of what was different at a ``later`` time; default: now."""
        values = _values(self._trainer, self._pl_module) if later is None else later._values
        metrics = _metrics(self._trainer, self._pl_module)
        blank = {name: blank_state(metric) for name, metric in metrics.items() if name not in self._values}
        return {name for name, value in values.items() if not _same(value, self._values.get(name, blank.get(name)))}

    def restore(self, leave: Collection[str] = ()) -> None:
        """Let everything be as it was, but what is in ``leave``."""
        for name, metric in _metrics(self._trainer, self._pl_module).items():
            if name not in leave:
                state = self._values.get(name, blank_state(metric))  # else it was logged for the first time since
                # Values that are there now may be changed in place by the next run; those kept here must not be.
                restore_metric(metric, {key: _own(value) for key, value in state.items()})
        with torch.no_grad():
            for name, buffer in self._pl_module.named_buffers():
                saved = self._values.get(f"buffer {name}")
                if saved is not None and f"buffer {name}" not in leave and saved.shape == buffer.shape:
                    buffer.copy_(saved)
        self.restore_random()
        connector = self._trainer._logger_connector
        self._pl_module._current_fx_name, connector._current_fx, connector._first_loop_iter = self._place

    def restore_random(self) -> None:
        """Draw the random numbers from here on that were drawn then."""
        _set_rng_states(self.random)


def _metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Metric]:
    metrics = {f"metric {name}": module for name, module in pl_module.named_modules() if isinstance(module, Metric)}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.is_tensor:  # else it stands for one of the module's
            metrics[f"logged {key}"] = metric
    return metrics


def _values(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    values: dict[str, Any] = {name: metric_state(metric) for name, metric in _metrics(trainer, pl_module).items()}
    for name, buffer in pl_module.named_buffers():
        values[f"buffer {name}"] = buffer.detach().clone()
    return values


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
