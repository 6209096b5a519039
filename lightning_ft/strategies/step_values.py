"""What is logged of a step that has several passes: a value of all of them, not of the last one."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor


class StepValues:
    """The step values of one batch, pass by pass. Epoch values need no care: they add up by themselves.

    Args:
        results: Where Lightning keeps what is logged.

    """

    def __init__(self, results: _ResultCollection) -> None:
        self._results = results
        self._values: dict[str, list[tuple[Tensor, int]]] = {}
        self._of_metrics: dict[str, Any] = {}

    def end_pass(self, *, is_own: bool, num_ranks: int) -> None:
        """Take in what a pass logged.

        Args:
            is_own: Whether it counts on this rank.
            num_ranks: On how many ranks it counts; a value that was reduced over the ranks stands for them.

        """
        for key, metric in self._results.items():
            value = metric._forward_cache
            if not metric.is_tensor:
                self._of_metrics.setdefault(key, value)  # of the rank's own batch
            elif metric.meta.on_step and isinstance(value, Tensor):
                weight = num_ranks if metric.meta.sync.should else int(is_own)
                self._values.setdefault(key, []).append((value, weight))
        self.reopen()

    def reopen(self) -> None:
        """Begin another pass: a value that it does not log is not to be counted again."""
        for key in self._values:
            self._results[key]._forward_cache = None

    def combine(self) -> None:
        """Let the values of all passes together be those of the step."""
        for key, value in self._of_metrics.items():
            self._results[key]._forward_cache = value
        for key, values in self._values.items():
            counting = [(value, weight) for value, weight in values if weight]
            metric: _ResultMetric = self._results[key]
            if counting:
                combined = _combine(metric.meta, counting)
                metric._forward_cache = combined
                self._values[key] = [(combined, sum(weight for _, weight in counting))]
                if not metric.meta.on_epoch:
                    metric.value = combined


def _combine(meta: Any, values: list[tuple[Tensor, int]]) -> Tensor:
    stacked = torch.stack([value for value, _ in values])
    if meta.is_mean_reduction:
        weights = torch.tensor([weight for _, weight in values], dtype=stacked.dtype, device=stacked.device)
        mean: Tensor = torch.tensordot(weights, stacked, 1) / weights.sum()
        return mean
    if meta.is_sum_reduction:
        return stacked.sum(0)
    fold: Callable[[Tensor, int], Tensor] = torch.amax if meta.is_max_reduction else torch.amin
    return fold(stacked, 0)
