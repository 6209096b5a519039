"""Averages the gradients of sharded parameters over the replicas.

Within a replica FSDP2 does it: when a backward pass ends, each rank has the mean over its replica of its own shard. Only
that shard is exchanged with the ranks of other replicas that hold the same one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_ft.elastic.exchange import Exchange, PendingExchange
from lightning_ft.elastic.groups import Group
from lightning_ft.strategies.buckets import local_part
from lightning_ft.strategies.reduction import FLAGS, GradientReducer, Reduced, learned


class ShardedReducer(GradientReducer):
    """Reduces the shards of gradients in buckets, over the replicas."""

    _scale = 1.0

    def resized(self) -> None:
        """The shards of the parameters have other sizes now."""
        parameters = self._parameters
        self._layouts.clear()
        self.follow(parameters)

    def finish(self) -> Reduced:
        """Collective. Return once ``p.grad`` holds this rank's shard of the average over all ranks whose batches count."""
        pending, self._pending, self.is_armed = self._pending, None, False
        self.collectives_inside = bool(self.collectives_inside) or self._engine.completed != self._completed
        result = self._engine.run(
            self._label, self._reduce, size=self._num_bytes, inline=self._inline, opened=pending, voted=True
        )
        if not result["is_whole"]:
            return replace(learned(result), is_whole=False)
        for bucket, flat in zip(self._buckets, result["buckets"], strict=False):
            if flat is not bucket.flat:  # of the other set: the step was begun again after it had been reduced
                bucket.flat.copy_(flat)
        if result["buckets"]:
            self._write_back(set(result["untouched"]))
        elif result["scale"] != 1.0:
            with torch.no_grad():
                torch._foreach_mul_([local_part(p.grad) for p in self._parameters if p.grad is not None], result["scale"])
        for uses in self._uses:
            uses.expected = max(uses.expected, uses.seen, 1)
            uses.any = False
        return learned(result, frozenset(self._parameters[index] for index in result["unused"]))

    @contextmanager
    def ghost_backward(self) -> Iterator[None]:
        """Let a backward pass of a loss times 0 add to ``p.grad`` what the other ranks of the replica computed."""
        yield

    def _averaging_ranks(self, exchange: Exchange | PendingExchange) -> tuple[Group | None, int]:
        return exchange.replicate, exchange.num_replicas

    def _counts(self) -> bool:
        return True  # a shard is of the gradients of the whole replica, and a batch that does not count added 0

    def _reduce(self, exchange: Exchange) -> dict[str, Any]:
        is_whole = self.covers(self._engine.members)
        flags = [FLAGS.unpack(row) for row in exchange.inline]
        weight, total = sum(row[2] for row in flags), sum(row[3] for row in flags)
        scale = total / weight if weight not in (0, total) else 1.0
        group, num_replicas = self._averaging_ranks(exchange)
        used = [float(num_replicas * uses.any) for uses in self._uses]
        if group is not None:
            if group is not self._group:
                self._start_over(group)
            if self._error is not None:
                raise self._error
            counts = self._reduce_buckets(group, num_replicas)  # also if not whole: some may have sent buckets already
            if is_whole and counts and counts[-1] < num_replicas:
                self._start_over(group)
                counts = self._reduce_buckets(group, num_replicas)
            used = counts[:-1] or used
            if is_whole and scale != 1.0:
                for bucket in self._buckets:
                    bucket.gradients.mul_(scale)
        return {
            "buckets": [] if group is None else [bucket.flat for bucket in self._buckets],
            "is_whole": is_whole,
            "scale": scale,
            "unused": [index for index, count in enumerate(used) if count < num_replicas],
            "untouched": [index for index, count in enumerate(used) if count == 0],
            **self._tell(exchange),
        }
