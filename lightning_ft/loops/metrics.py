"""The states of a module's torchmetrics, which its ``state_dict`` leaves out."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric, MetricCollection


def metric_states(module: Module, leave_out: Collection[Metric]) -> dict[str, dict[str, Any]]:
    """Return as plain data what each metric of ``module`` has gathered, by its name."""
    for child in module.modules():
        if isinstance(child, MetricCollection):
            list(child.values(copy_state=True))  # of metrics that share a state, only one is up to date otherwise
    left_out = {id(metric) for metric in leave_out}
    return {
        name: {"state": _state_of(metric), "update_count": metric._update_count}
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and id(metric) not in left_out
    }


def load_metric_states(module: Module, states: dict[str, dict[str, Any]]) -> None:
    """Give the metrics of ``module`` back what they had gathered."""
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and name in states:
            for attribute, value in states[name]["state"].items():
                setattr(metric, attribute, _to(value, metric.device))
            metric._update_count = states[name]["update_count"]
            metric._computed = None


def _state_of(metric: Metric) -> dict[str, Any]:
    return {name: _copy(getattr(metric, name)) for name in metric._defaults}


def _copy(value: Any) -> Any:
    return [item.detach().clone() for item in value] if isinstance(value, list) else value.detach().clone()


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else [item.to(device) for item in value]
