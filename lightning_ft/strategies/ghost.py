"""Steps that a rank takes without a batch of its own, so that they leave no trace but their part in the collectives."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.loops.metric_state import blank_state, metric_state, restore_metric


class GhostSteps:
    """The steps of one rank in which it only keeps the others company.

    Towards the end of an epoch, or while ranks are missing, there may be fewer batches than ranks. Every rank must still
    run the step, since the module may call collectives in it.

    Args:
        trainer: The trainer.
        pl_module: Whose metrics and buffers are to stay as they are.
        collectives: In which this rank has no weight meanwhile.

    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, collectives: Collectives) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._collectives = collectives
        self._stand_ins: list[tuple[Metric, dict[str, Any], int]] = []

    def withdraw(self) -> None:
        """Take back what stood in for batches of this rank: the epoch has another one."""
        for metric, saved, count in self._stand_ins:
            if metric._update_count == count:
                restore_metric(metric, saved)
        self._stand_ins.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Undo afterwards what the step changed in logged values, metrics and buffers; count nothing of it in means.

        But a value of this rank alone stays until it has one of its own: should the epoch end before, it would be NaN.
        Under ``ddp`` such a rank has a repeated sample.
        """
        results = self._trainer._results
        assert results is not None
        metrics = [module for module in self._pl_module.modules() if isinstance(module, Metric)]
        saved = [(metric, metric_state(metric)) for metric in (*metrics, *results.values())]
        known = list(results)
        buffers = {name: buffer.detach().clone() for name, buffer in self._pl_module.named_buffers()}
        update_metrics = results.update_metrics

        def update_silently(key: str, value: Any, batch_size: int) -> None:
            update_metrics(key, value, batch_size)
            if not results[key].meta.sync.should:
                results[key]._forward_cache = None  # a step value of this rank alone: not to be logged

        results.update_metrics = update_silently
        self._collectives.weight = 0.0
        try:
            yield
        finally:
            self._collectives.weight = 1.0
            del results.update_metrics
            # A key logged for the first time stays, as on the other ranks.
            saved += [(results[key], blank_state(results[key])) for key in results.keys() - set(known)]
            for metric, state in saved:
                if _would_be_of_nothing(metric, state):
                    self._stand_ins.append((metric, state, metric._update_count))
                else:
                    restore_metric(metric, state)
            for name, buffer in self._pl_module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.detach().copy_(buffers[name])


def _would_be_of_nothing(metric: Metric, state: dict[str, Any]) -> bool:
    """Whether ``metric`` in this ``state`` has no value, and would not get one from the other ranks either."""
    if not isinstance(metric, _ResultMetric):
        return not metric.sync_on_compute and not state["_update_count"]
    if not metric.is_tensor or metric.meta.sync.should or not metric.meta.on_epoch:
        return False
    if metric.meta.is_mean_reduction:
        return not state["cumulated_batch_size"]
    return math.isinf(state["value"])
