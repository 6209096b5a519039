"""A step that a rank takes without a batch of its own, so that it leaves no trace but its part in the collectives."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ft.elastic.collectives import Collectives


@contextmanager
def ghost_step(trainer: Trainer, pl_module: LightningModule, collectives: Collectives) -> Iterator[None]:
    """Undo afterwards what the step changed in logged values, metrics and buffers; count nothing of it in means.

    Towards the end of an epoch, or while ranks are missing, there may be fewer batches than ranks. Every rank must still
    run the step, since the module may call collectives in it.
    """
    results = trainer.fit_loop.epoch_loop._results
    metrics = [module for module in pl_module.modules() if isinstance(module, Metric)]
    saved = [_metric_state(metric) for metric in (*metrics, *results.values())]
    known = list(results)
    buffers = {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()}
    update_metrics = results.update_metrics

    def update_silently(key: str, value: Any, batch_size: int) -> None:
        update_metrics(key, value, batch_size)
        if not results[key].meta.sync.should:
            results[key]._forward_cache = None  # a step value of this rank alone: not to be logged

    results.update_metrics = update_silently
    collectives.weight = 0.0
    try:
        yield
    finally:
        collectives.weight = 1.0
        del results.update_metrics
        for metric, state in zip((*metrics, *(results[key] for key in known)), saved, strict=True):
            _restore_metric(metric, state)
        for key in results.keys() - set(known):
            metric = results[key]
            if metric.is_tensor:  # a key logged for the first time: it stays, with nothing accumulated
                metric.reset()
                metric.has_reset = False
        for name, buffer in pl_module.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.detach().copy_(buffers[name])


def _metric_state(metric: Metric) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = list(value) if isinstance(value, list) else value.detach().clone()
    counters = ("_update_count", "_computed", "has_reset")
    return {"states": state, "counters": {name: getattr(metric, name) for name in counters if hasattr(metric, name)}}


def _restore_metric(metric: Metric, saved: dict[str, Any]) -> None:
    for name, value in {**saved["states"], **saved["counters"]}.items():
        object.__setattr__(metric, name, value) if isinstance(value, Tensor | list) else setattr(metric, name, value)
