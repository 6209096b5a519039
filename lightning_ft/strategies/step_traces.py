"""What a training step leaves behind beside gradients, so that it can be taken back when the step is begun again."""

from collections.abc import MutableMapping
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_ft.loops.metric_state import blank_state, metric_state, restore_metric


class StepTraces:
    """Logged values, metrics, buffers and random numbers as they are now.

    Args:
        results: The values that the running loop logged; None if it logs none.
        pl_module: The module.

    """

    def __init__(self, results: MutableMapping[str, Any] | None, pl_module: LightningModule) -> None:
        self._pl_module = pl_module
        self._results = {} if results is None else results
        metrics = [module for module in pl_module.modules() if isinstance(module, Metric)]
        self._metrics: list[tuple[Metric, dict[str, Any]]] = [
            (metric, metric_state(metric)) for metric in (*metrics, *self._results.values())
        ]
        self._known = set(self._results)
        self._buffers = {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()}
        self._random = _collect_rng_states(include_cuda=False)
        self._current_fx_name = pl_module._current_fx_name

    def undo(self) -> None:
        """Let everything be as it was."""
        new = [(self._results[key], blank_state(self._results[key])) for key in self._results.keys() - self._known]
        for metric, state in (*self._metrics, *new):
            restore_metric(metric, dict(state))
        with torch.no_grad():
            for name, buffer in self._pl_module.named_buffers():
                if name in self._buffers and self._buffers[name].shape == buffer.shape:
                    buffer.copy_(self._buffers[name])
        _set_rng_states(self._random)
        self._pl_module._current_fx_name = self._current_fx_name
