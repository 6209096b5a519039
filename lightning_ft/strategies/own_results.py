"""What a rank alone has logged and measured in the epoch so far: its part of what is reduced at the end."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ft.loops.logged_results import loops_that_log


def describe(trainer: Trainer) -> dict[str, Any]:
    """Return the state of all metrics, copied."""
    return {name: _state(metric) for name, metric in _metrics(trainer)}


def take_back(trainer: Trainer, states: dict[str, Any]) -> None:
    """Set all metrics to what :func:`describe` returned; those that it did not know are as if never updated."""
    for name, metric in _metrics(trainer):
        if name not in states:
            metric.reset()
            continue
        for key, value in states[name].items():
            if isinstance(value, list):
                object.__setattr__(metric, key, [entry.to(metric.device) for entry in value])
            elif isinstance(value, Tensor):
                object.__setattr__(metric, key, value.to(metric.device))
            else:
                setattr(metric, key, value)
        metric._computed = None


def _metrics(trainer: Trainer) -> Iterator[tuple[str, Metric]]:
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, Metric):
            yield f"module {name}", module
    for number, loop in enumerate(loops_that_log(trainer)):
        for key, metric in loop._results.items():
            if metric.is_tensor:
                yield f"logged {number} {key}", metric


def _state(metric: Metric) -> dict[str, Any]:
    state: dict[str, Any] = {"_update_count": metric._update_count}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = [entry.detach().clone() for entry in value] if isinstance(value, list) else value.detach().clone()
    return state
