"""What a rank has logged since the epoch began: which reductions it takes part in at the end depends on it."""

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn

_METADATA = tuple(f.name for f in fields(_Metadata) if f.name not in ("reduce_fx", "_sync"))


def loops_that_log(trainer: Trainer) -> list[Any]:
    """Return the loops of a fit that keep what is logged in them."""
    return [trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]


def has_epoch_values(trainer: Trainer) -> bool:
    """Whether a fit has logged something in the epoch under way of which the epoch's value is still to come."""
    if trainer.state.fn != TrainerFn.FITTING:
        return False
    results = trainer.fit_loop.epoch_loop._results
    return any(metric.meta.on_epoch and not metric.has_reset for metric in results.values())


def describe(results: _ResultCollection, *, to_same_rank: bool = False) -> list[dict[str, Any]]:
    """Return as plain data what :func:`take_over` needs.

    Args:
        results: What was logged.
        to_same_rank: Whether the rank that takes it over takes this rank's place, and not one beside it.

    """
    return [_describe_one(key, metric, to_same_rank) for key, metric in results.items()]


def _describe_one(key: str, metric: _ResultMetric, to_same_rank: bool) -> dict[str, Any]:
    """Its metadata; of what was logged, what no reduction over the ranks would count twice."""
    meta = metric.meta
    values = {"_computed": metric._computed, "_forward_cache": metric._forward_cache}
    if to_same_rank or not meta.sync.should:
        values |= {name: getattr(metric, name) for name in metric._defaults}
    return {
        "key": key,
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "update_count": metric._update_count,
        "metadata": {name: getattr(meta, name) for name in _METADATA},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": {"should": meta.sync.should, "op": meta.sync.op, "rank_zero_only": meta.sync.rank_zero_only},
        "values": values if metric.is_tensor else {},
    }


def take_over(trainer: Trainer, results: _ResultCollection, descriptions: list[dict[str, Any]]) -> None:
    """Have the same logged values in the same order in a rank that joins, with nothing that would be counted twice."""
    mine = dict(results)
    results.clear()
    for description in descriptions:
        metric = mine.get(description["key"])
        if metric is None or metric.has_reset:
            metric = _make_result(trainer, description)
        metric.has_reset = description["has_reset"]
        results[description["key"]] = metric.to(trainer.strategy.root_device)


def _make_result(trainer: Trainer, description: dict[str, Any]) -> _ResultMetric:
    meta = _Metadata(**description["metadata"], reduce_fx=getattr(torch, description["reduce_fx"]))
    sync = description["sync"]
    meta.sync = _Sync(
        _should=sync["should"], fn=trainer.strategy.reduce, rank_zero_only=sync["rank_zero_only"], _op=sync["op"]
    )
    metric = _ResultMetric(meta, description["is_tensor"])
    metric._update_count = description["update_count"]  # else it warns that it was computed before any update
    for name, value in description["values"].items():
        setattr(metric, name, value)
    if not description["is_tensor"]:
        assert meta.metric_attribute is not None
        metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return metric
