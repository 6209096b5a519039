"""Averages gradients over the replicas while backward still runs, and keeps the local ones until that succeeded.

``p.grad`` holds this rank's own gradient until every bucket is reduced. If a rank dies meanwhile, all buckets are filled
and reduced again among the survivors: its gradient is left out of the average and nothing is computed twice.
"""

import operator
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange, PendingExchange
from lightning_ft.elastic.groups import Group, Work
from lightning_ft.rerun.gradient_norm import TotalNorm
from lightning_ft.strategies.average_norm import AverageNorm
from lightning_ft.strategies.buckets import Bucket, Layout, as_gradient, local_part, write_back
from lightning_ft.strategies.sparse_gradients import no_rows, sum_rows, write_rows

_UNKNOWN = 1 << 60
_MAX_LAYOUTS = 4
FLAGS = struct.Struct("=??qq")


@dataclass(frozen=True)
class Reduced:
    """What the ranks learned from one reduction, the same on all of them.

    Args:
        members: Slots whose gradients are in the average.
        join: Somebody waits to be admitted at the next step boundary.
        hold: Too few replicas are left to go on after this step.
        stop: A rank was asked to end after this step.
        contributors: How many ranks had a gradient that counts.
        unused: Parameters of which a rank whose gradients count has none.
        is_whole: Whether all batches of the step are in it; if not, ``p.grad`` is as it was.

    """

    members: tuple[int, ...]
    join: bool
    hold: bool
    stop: bool
    contributors: int
    unused: frozenset[Parameter] = frozenset()
    is_whole: bool = True


class _Uses:
    """How often backward added to a parameter's gradient. Looked up by nothing: hashing a parameter is slow.

    Args:
        parameter: The parameter.

    """

    __slots__ = ("any", "bucket", "expected", "in_ghost", "parameter", "seen")

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.bucket = 0
        self.seen = 0  # in the backward pass under way
        self.expected = 0  # the most that was seen; 0: no reduction had it yet
        self.any = False  # in a backward pass since the last reduction
        self.in_ghost = False  # the same for passes that do not count


class GradientReducer:
    """Reduces the gradients of a module in buckets.

    Args:
        parameters: The module's parameters; those that do not require a gradient now are left alone.
        engine: Runs the reduction as one operation.
        bucket_bytes: Size above which a bucket is closed.
        sparse: Parameters whose gradients are sparse.

    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        engine: Engine,
        bucket_bytes: int = 25 << 20,
        sparse: Collection[Parameter] = frozenset(),
    ) -> None:
        self._engine = engine
        self._sparse = sparse
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._spare: list[Bucket] | None = None
        self._layouts: list[Layout] = []  # the last one is that of the parameters that require gradients now
        self._known: dict[Parameter, _Uses] = {}
        self._uses: list[_Uses] = []  # of the layout's parameters
        self._handles: list[RemovableHandle] = []
        self.collectives_inside: bool | None = None
        """Whether backward passes call collectives; None before the first. Must be the same on all ranks.

        Then nothing is reduced before backward is over: collectives run in one order, the same on all ranks.
        """
        self.covers: Callable[[Collection[int]], bool] = lambda members: True
        """Whether the gradients of these slots are all that the step is to have; otherwise nothing is averaged."""
        self.while_reducing: Callable[[Tensor | None], None] | None = None
        """Called in each reduction, once its messages are under way: ``p.grad`` is this rank's own gradient then.

        It gets the norm of that, if it could be measured as the messages were written; that of averages is then, too.
        """
        self.average_norm = AverageNorm()
        """Of the newest average."""
        self.is_armed = False
        self._pending: PendingExchange | None = None
        self._group: Group | None = None
        self._works: list[Work] = []
        self._own_norms: list[TotalNorm] = []  # of what was sent, message by message
        self._error: RuntimeError | None = None
        self._in_ghost = False
        self._changed_late = False
        self._is_shown = False
        self.follow(parameters)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Those that are reduced."""
        return self._parameters

    def close(self) -> None:
        """Take the hooks off the parameters. May be called twice."""
        for handle in self._handles:
            handle.remove()

    def follow(self, parameters: Iterable[Parameter]) -> None:
        """Reduce from now on what requires a gradient now: parameters may be frozen, unfrozen or added; alike on all ranks.

        To be called before every backward pass. Layouts are kept: adversarial training alternates between two.
        """
        trainable = [p for p in parameters if p.requires_grad]
        if self._layouts:
            layout = self._layouts[-1]
            if _are_same(layout.parameters, trainable):
                return
            layout.buckets, layout.spare = self._buckets, self._spare
        known = next((layout for layout in self._layouts if _are_same(layout.parameters, trainable)), None)
        layout = known or Layout(trainable, self._bucket_bytes, self._sparse)
        self._layouts = [*(other for other in self._layouts if other is not layout), layout][-_MAX_LAYOUTS:]
        self._parameters, self._num_bytes = layout.parameters, layout.num_bytes
        self._buckets, self._spare = layout.buckets, layout.spare
        for parameter in trainable:
            if parameter not in self._known:
                self._known[parameter] = uses = _Uses(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, uses)))
        self._uses = [self._known[parameter] for parameter in trainable]
        for uses, bucket in zip(self._uses, layout.bucket_of, strict=True):
            uses.bucket = bucket

    def take_up(self) -> None:
        """Have gradients that are there already be those of backward passes since the last reduction."""
        for uses in self._uses:
            uses.any = uses.parameter.grad is not None

    def arm(self, weight: int, total: int, *, stop: bool, label: str = "gradients") -> None:
        """Collective. Announce the reduction; the backward pass that follows feeds it.

        Args:
            weight: Micro-batches of this rank in this window that count.
            total: Micro-batches that each rank has in it by itself.
            stop: Whether this rank was asked to end after this step.
            label: Names the reduction, for the error when ranks are in different ones.

        """
        self._weight, self._label = weight, label
        self._inline = FLAGS.pack(self._engine.join_wanted, stop, weight, total)
        self._completed = self._engine.completed
        self.is_armed, self._is_shown = True, False
        if self.collectives_inside is False:
            self._pending = self._engine.open(label, size=self._num_bytes, inline=self._inline)
        if self._spare is not None:
            self._buckets, self._spare = self._spare, self._buckets
        # How often a parameter's gradient is added to is learned: in the first step nothing is reduced before backward is
        # over, since a shared block under checkpointing adds to its parameters twice. One that was not used yet may be now.
        self._missing = [0] * len(self._buckets)
        for uses in self._uses:
            uses.seen = 0
            self._missing[uses.bucket] += uses.expected or _UNKNOWN
        self._start_over(None)

    def finish(self) -> Reduced:
        """Collective. Return once ``p.grad`` holds the average over the contributing replicas."""
        pending, self._pending, self.is_armed = self._pending, None, False
        self.collectives_inside = bool(self.collectives_inside) or self._engine.completed != self._completed
        result = self._engine.run(self._label, self._reduce, size=self._num_bytes, inline=self._inline, opened=pending)
        if not result["is_whole"]:
            return replace(learned(result), is_whole=False)
        self._show_own()  # if nothing was sent, or this rank failed in it
        self._hold(result["buckets"])
        if self._buckets and not self._engine.alone:
            self._write_back(set(result["untouched"]))
            for parameter, (rows, values) in zip(self._layouts[-1].sparse, result["sparse"], strict=True):
                if len(rows):
                    write_rows(parameter, rows, values)
        for uses in self._uses:
            uses.expected = max(uses.expected, uses.seen, 1)
            uses.any = uses.in_ghost = False
        for index in result["zeros"]:
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = no_rows(parameter) if parameter in self._sparse else torch.zeros_like(parameter)
        return learned(result, frozenset(self._parameters[index] for index in result["unused"]))

    @contextmanager
    def ghost_backward(self) -> Iterator[None]:
        """Let a backward pass leave no trace in ``p.grad``, not even a zero where ranks whose batches count have None."""
        kept = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._in_ghost = True
        try:
            yield
        finally:
            self._in_ghost = False
            for parameter, gradient in kept:
                parameter.grad = gradient

    def agree(self, *, stop: bool, label: str) -> Reduced:
        """Collective. Let the ranks learn what a reduction would tell them, where there is none."""
        inline = FLAGS.pack(self._engine.join_wanted, stop, 0, 0)
        return learned(self._engine.run(label, self._tell, inline=inline))

    def _on_gradient(self, uses: _Uses, parameter: Parameter) -> None:
        if self._in_ghost:
            uses.in_ghost = True
            return
        uses.any = True
        if not self.is_armed:
            return  # an inner micro-batch of an accumulation window
        uses.seen += 1
        self._missing[uses.bucket] -= 1
        self._changed_late = self._changed_late or uses.bucket < len(self._works)
        pending = self._pending
        while pending is not None and self._error is None and self._next_is_complete() and self._may_launch(pending):
            try:
                self._launch(*self._averaging_ranks(pending))
            except RuntimeError as error:  # not through the autograd engine: `finish` meets it again
                self._error = error

    def _next_is_complete(self) -> bool:
        # The last one tells whether a gradient changed late, which is known when backward is over.
        return len(self._works) < len(self._buckets) - 1 and self._missing[len(self._works)] <= 0

    def _may_launch(self, pending: PendingExchange) -> bool:
        """Whether the buckets may be overwritten: nobody needs what lies in them any more.

        They hold the result of an earlier reduction, which a rank that failed in it may ask for. Once all ranks are in this
        operation, they have completed all before it. With two sets that is known already: what lies in this one is the
        result of the reduction before the last, and the last one began with all ranks in it.
        """
        if self._averaging_ranks(pending)[0] is None or pending.withdrawn:
            return False
        return self._spare is not None or pending.ready

    def _start_over(self, group: Group | None) -> None:
        self._group = group
        self._works = []
        self._own_norms = []
        self._error = None
        self._changed_late = False  # whatever is filled from now on is whole
        self.average_norm.forget()

    def _averaging_ranks(self, exchange: Exchange | PendingExchange) -> tuple[Group | None, int]:
        """Return the group over which buckets are averaged, and its size."""
        return exchange.group, exchange.size

    def _counts(self) -> bool:
        """Whether the gradients here are those of batches that count."""
        return self._weight > 0

    def _launch(self, group: Group | None, size: int) -> None:
        assert group is not None
        if group is not self._group:
            self._start_over(group)
        bucket = self._buckets[len(self._works)]
        scale = 1.0 / size if self._counts() else 0.0
        norm = None if self.while_reducing is None else TotalNorm()
        bucket.fill(scale, norm)
        if norm is not None and self._counts():
            self._own_norms.append(norm)
        if bucket.flags.numel():
            used = [self._counts() and uses.any for uses in self._uses]
            used.append(not self._changed_late)
            bucket.flags.fill_(1.0) if all(used) else bucket.flags.copy_(torch.tensor(used))
        self._works.append(group.allreduce([bucket.message]))

    def _reduce(self, exchange: Exchange) -> dict[str, Any]:
        is_whole = self.covers(self._engine.members)
        flags = [FLAGS.unpack(row) for row in exchange.inline]
        counts: list[float] = []
        sparse: list[tuple[Tensor, Tensor]] = []
        zeros: list[int] = []
        if exchange.group is not None:
            if exchange.group is not self._group:
                self._start_over(exchange.group)
            if self._error is not None:
                raise self._error
            counts = self._reduce_buckets(exchange.group, exchange.size)
            if not is_whole:  # and yet reduced: some may have sent buckets already, which all ranks must take
                return {"is_whole": False, **self._tell(exchange)}
            if counts and counts[-1] < exchange.size:
                # A rank used a parameter more often than in any step before, and sent its gradient too early.
                self._start_over(exchange.group)
                counts = self._reduce_buckets(exchange.group, exchange.size)
            weight, total = sum(row[2] for row in flags), sum(row[3] for row in flags)
            scale = 1.0 / exchange.size if self._weight else 0.0
            sparse = [sum_rows(exchange, parameter, scale) for parameter in self._layouts[-1].sparse]
            if weight not in (0, total):  # the mean is over the micro-batches that count, not over all ranks
                for tensor in (*(bucket.gradients for bucket in self._buckets), *(values for _, values in sparse)):
                    tensor.mul_(total / weight)
            if weight == 0:
                # Whoever had a batch died. Optimizers are stepped all the same, and find the gradients that they would.
                touched = torch.tensor([float(uses.in_ghost) for uses in self._uses])
                exchange.all_reduce(touched)
                zeros = touched.nonzero().flatten().tolist()
        contributors = sum(row[2] > 0 for row in flags)
        return {
            "buckets": [bucket.flat for bucket in self._buckets],
            "unused": [index for index, count in enumerate(counts[:-1]) if count < contributors],
            "sparse": sparse,
            "zeros": zeros,
            "untouched": [index for index, count in enumerate(counts[:-1]) if count == 0],
            "is_whole": True,
            **self._tell(exchange),
        }

    def _tell(self, exchange: Exchange) -> dict[str, Any]:
        flags = [FLAGS.unpack(row) for row in exchange.inline]
        return {
            "members": list(self._engine.members),
            "contributors": sum(row[2] > 0 for row in flags),
            "join": any(row[0] for row in flags),
            # Of this generation and in the result: a rank that gets it later must not go by what it knows then.
            "hold": self._engine.hold,
            "stop": any(row[1] for row in flags),
        }

    def _reduce_buckets(self, group: Group, size: int) -> list[float]:
        """Return how many ranks used each parameter and, last, did so in time; empty if all ranks did."""
        while len(self._works) < len(self._buckets):
            self._launch(group, size)
        self._show_own()
        for work in self._works:
            work.wait()
        if not self._buckets or self._buckets[-1].flags.min() >= size:
            return []
        counts: list[float] = self._buckets[-1].flags.tolist()
        return counts

    def _hold(self, flats: Sequence[Tensor]) -> None:
        """Let the buckets hold the averages, also if another rank has completed the reduction."""
        for bucket, flat in zip(self._buckets, flats, strict=True):
            if flat is not bucket.flat:
                bucket.flat.copy_(flat)

    def _show_own(self) -> None:
        if self.while_reducing is not None and not self._is_shown:
            self.while_reducing(self._own_norm())
        self._is_shown = True

    def _own_norm(self) -> Tensor | None:
        """Return the norm of this rank's own gradient, if it is what was sent."""
        is_sent = len(self._own_norms) == len(self._buckets) and not self._changed_late and not self._layouts[-1].sparse
        return TotalNorm(self._own_norms).value if is_sent else None

    @torch.no_grad()  # with `create_graph=True` gradients have a graph of their own
    def _write_back(self, untouched: set[int]) -> None:
        """Let ``p.grad`` be the average; a parameter that no rank used keeps what it has, as under ``ddp``."""
        kept = {self._parameters[index] for index in untouched}
        norm = None if self.while_reducing is None or kept else self.average_norm.total
        for bucket in self._buckets:
            averages = [pair for pair in zip(bucket.parameters, bucket.views, strict=True) if pair[0] not in kept]
            for parameter, view in averages:
                if parameter.grad is None:  # used by another rank only
                    parameter.grad = as_gradient(parameter, torch.empty_like(view))
            gradients = [local_part(parameter.grad) for parameter, _ in averages if parameter.grad is not None]
            write_back(gradients, [view for _, view in averages], norm)
        if not kept:
            self.average_norm.is_of(self._parameters)


def _are_same(some: list[Parameter], others: list[Parameter]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def learned(result: dict[str, Any], unused: frozenset[Parameter] = frozenset()) -> Reduced:
    """Return what an operation told."""
    return Reduced(tuple(result["members"]), result["join"], result["hold"], result["stop"], result["contributors"], unused)
