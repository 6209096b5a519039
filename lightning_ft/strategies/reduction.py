"""Averages gradients over the replicas while backward still runs, and keeps the local ones until that succeeded.

``p.grad`` holds this rank's own gradient until every bucket is reduced. If a rank dies meanwhile, all buckets are filled
and reduced again among the survivors: its gradient is left out of the average and nothing is computed twice.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange, PendingExchange
from lightning_ft.elastic.groups import Group, Work

_UNKNOWN = 1 << 60
_SPARE_BYTES = 16 << 20
_FLAGS = struct.Struct("=??qq")


@dataclass(frozen=True)
class Reduced:
    """What the ranks learned from one reduction, the same on all of them.

    Args:
        members: Slots whose gradients are in the average.
        join: Somebody waits to be admitted at the next step boundary.
        hold: Too few replicas are left to go on after this step.
        stop: A rank was asked to end after this step.

    """

    members: tuple[int, ...]
    join: bool
    hold: bool
    stop: bool


class _Bucket:
    """Parameters that are reduced in one message.

    Args:
        parameters: Of one dtype and device, in the order in which backward is expected to reach them.
        num_flags: Extra elements at the end, 1 for every parameter of the model that has a gradient here.

    """

    def __init__(self, parameters: list[Parameter], num_flags: int) -> None:
        self.parameters = parameters
        first = parameters[0]
        numels = [p.numel() for p in parameters]
        self.flat = torch.ones(sum(numels) + num_flags, dtype=first.dtype, device=first.device)
        *parts, self.flags = self.flat.split([*numels, num_flags])
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def fill(self, scale: float) -> None:
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None or scale == 0.0:
                view.zero_()
            else:
                torch.mul(parameter.grad, scale, out=view)


class GradientReducer:
    """Reduces the gradients of a module in buckets.

    Args:
        parameters: The module's parameters; those that do not require a gradient now are left alone.
        engine: Runs the reduction as one operation.
        bucket_bytes: Size above which a bucket is closed.

    """

    def __init__(self, parameters: Iterable[Parameter], engine: Engine, bucket_bytes: int = 25 << 20) -> None:
        self._engine = engine
        trainable = [p for p in parameters if p.requires_grad]
        self._parameters = trainable
        self._buckets = _make_buckets(trainable, bucket_bytes)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._num_bytes = sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)
        # A second set, filled in turn, if it costs little: see `_may_launch`.
        self._spare = _make_buckets(trainable, bucket_bytes) if self._num_bytes <= _SPARE_BYTES else None
        self.collectives_inside: bool | None = None
        """Whether backward passes call collectives; None before the first. Must be the same on all ranks.

        Then nothing is reduced before backward is over: collectives run in one order, the same on all ranks.
        """
        self._armed = False
        self._pending: PendingExchange | None = None
        self._group: Group | None = None
        self._works: list[Work] = []
        self._error: RuntimeError | None = None
        self._seen = dict.fromkeys(trainable, 0)
        self._expected: dict[Parameter, int] | None = None
        self._changed_late = False
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trainable]

    def close(self) -> None:
        """Take the hooks off the parameters. May be called twice."""
        for handle in self._handles:
            handle.remove()

    def arm(self, weight: int, total: int, *, stop: bool) -> None:
        """Collective. Announce the reduction; the backward pass that follows feeds it.

        Args:
            weight: Micro-batches of this window that count.
            total: Micro-batches of this window.
            stop: Whether this rank was asked to end after this step.

        """
        self._weight, self._total, self._stop = weight, total, stop
        self._inline = _FLAGS.pack(self._engine.join_wanted, stop, weight, total)
        self._completed = self._engine.completed
        self._armed = True
        if self.collectives_inside is False:
            self._pending = self._engine.open("gradients", size=self._num_bytes, inline=self._inline)
        if self._spare is not None:
            self._buckets, self._spare = self._spare, self._buckets
        # How often a parameter's gradient is added to is learned: in the first step nothing is reduced before backward is
        # over, since a shared block under checkpointing adds to its parameters twice. One that was not used yet may be now.
        is_first = self._expected is None
        self._expected = {p: max(1, self._seen[p], (self._expected or {}).get(p, 1)) for p in self._parameters}
        self._missing = [
            _UNKNOWN if is_first else sum(self._expected[p] for p in bucket.parameters) for bucket in self._buckets
        ]
        self._seen = dict.fromkeys(self._parameters, 0)
        self._changed_late = False
        self._start_over(None)

    def finish(self) -> Reduced:
        """Collective. Return once ``p.grad`` holds the average over the contributing replicas."""
        pending, self._pending, self._armed = self._pending, None, False
        self.collectives_inside = bool(self.collectives_inside) or self._engine.completed != self._completed
        result = self._engine.run("gradients", self._reduce, size=self._num_bytes, inline=self._inline, opened=pending)
        if self._changed_late:
            raise TypeError(
                "A gradient was added to after its reduction had begun: this backward pass used a parameter more often than"
                " any before. Run such a module with `FTStrategy` only if each step uses its parameters alike."
            )
        for bucket, flat in zip(self._buckets, result["buckets"], strict=True):
            if flat is not bucket.flat:  # received from a rank that completed this reduction
                bucket.flat.copy_(flat)
        if self._buckets and not self._engine.alone:
            self._write_back()
        return Reduced(tuple(result["members"]), result["join"], result["hold"], result["stop"])

    def _on_gradient(self, parameter: Parameter) -> None:
        if not self._armed:
            return  # an inner micro-batch of an accumulation window
        bucket = self._bucket_of[parameter]
        self._seen[parameter] += 1
        self._missing[bucket] -= 1
        self._changed_late = self._changed_late or bucket < len(self._works)
        pending = self._pending
        while pending is not None and self._error is None and self._next_is_complete() and self._may_launch(pending):
            try:
                assert pending.group is not None
                self._launch(pending.group, pending.size)
            except RuntimeError as error:  # not through the autograd engine: `finish` meets it again
                self._error = error

    def _next_is_complete(self) -> bool:
        return len(self._works) < len(self._buckets) and self._missing[len(self._works)] <= 0

    def _may_launch(self, pending: PendingExchange) -> bool:
        """Whether the buckets may be overwritten: nobody needs what lies in them any more.

        They hold the result of an earlier reduction, which a rank that failed in it may ask for. Once all ranks are in this
        operation, they have completed all before it. With two sets that is known already: what lies in this one is the
        result of the reduction before the last, and the last one began with all ranks in it.
        """
        if pending.group is None or pending.withdrawn:
            return False
        return self._spare is not None or pending.ready

    def _start_over(self, group: Group | None) -> None:
        self._group = group
        self._works = []
        self._error = None

    def _launch(self, group: Group, size: int) -> None:
        if group is not self._group:
            self._start_over(group)
        bucket = self._buckets[len(self._works)]
        bucket.fill(1.0 / size if self._weight else 0.0)
        if bucket.flags.numel():
            used = [self._weight > 0 and p.grad is not None for p in self._parameters]
            bucket.flags.fill_(1.0) if all(used) else bucket.flags.copy_(torch.tensor(used))
        self._works.append(group.allreduce([bucket.flat]))

    def _reduce(self, exchange: Exchange) -> dict[str, Any]:
        flags = [_FLAGS.unpack(row) for row in exchange.inline]
        if exchange.group is not None:
            if exchange.group is not self._group:
                self._start_over(exchange.group)
            if self._error is not None:
                raise self._error
            while len(self._works) < len(self._buckets):
                self._launch(exchange.group, exchange.size)
            for work in self._works:
                work.wait()
            weight, total = sum(row[2] for row in flags), sum(row[3] for row in flags)
            if weight != total:  # the mean is over the micro-batches that count, not over all ranks
                for bucket in self._buckets:
                    bucket.flat.mul_(total / max(weight, 1))
        return {
            "buckets": [bucket.flat for bucket in self._buckets],
            "members": list(self._engine.members),
            "join": any(row[0] for row in flags),
            # Of this generation and in the result: a rank that gets it later must not go by what it knows then.
            "hold": self._engine.hold,
            "stop": any(row[1] for row in flags),
        }

    def _write_back(self) -> None:
        used: Tensor | None = None
        for bucket in self._buckets:
            pairs = [(p.grad, view) for p, view in zip(bucket.parameters, bucket.views, strict=True) if p.grad is not None]
            if pairs:
                torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])
            if len(pairs) == len(bucket.parameters):
                continue
            if used is None:
                used = self._buckets[-1].flags > 0
            index = {p: i for i, p in enumerate(self._parameters)}
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None and used[index[parameter]]:  # used by another rank only
                    parameter.grad = view.clone()


def _make_buckets(parameters: list[Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Group parameters, last ones first as backward reaches them; one dtype and device a bucket."""
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group, size = open_groups.pop(kind, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size < bucket_bytes:
            open_groups[kind] = (group, size)
    make = [partial(_Bucket, group, 0) for group in groups[:-1]]
    make += [partial(_Bucket, group, len(parameters)) for group in groups[-1:]]
    return [bucket() for bucket in make]
