"""The state of one torchmetric or logged value, to bring it back to where it was."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return what :func:`restore_metric` needs to bring ``metric`` back to where it is."""
    state: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = list(value) if isinstance(value, list) else value.detach().clone()
    # Not `has_reset` and `_computed`: on them depends what is reduced at the end of the epoch, on all ranks alike.
    return {**state, "_update_count": metric._update_count}


def blank_state(metric: Metric) -> dict[str, Any]:
    """Return the state of ``metric`` before its first update."""
    state: dict[str, Any] = {
        name: [] if isinstance(value, list) else value.clone() for name, value in metric._defaults.items()
    }
    return {**state, "_update_count": 0}


def restore_metric(metric: Metric, saved: dict[str, Any]) -> None:
    """Bring ``metric`` back to a state that it had."""
    for name, value in saved.items():
        object.__setattr__(metric, name, value) if isinstance(value, Tensor | list) else setattr(metric, name, value)
