"""Knows what a tensor that comes by is to be called, and whether it was dumped already."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_ft.dump.index import NO_BATCH, Moment
from lightning_ft.dump.selection import Selection
from lightning_ft.dump.tensors import tensors_in, whole
from lightning_ft.sharding.full_state import gather_full


class Sink(Protocol):
    """Where tensors go."""

    def put(self, moment: Moment, name: str, tensor: Tensor, call: int = 0) -> None:
        """Write ``tensor`` as it is now."""


class Pass:
    """One run of a step of the module: what was dumped at its moment, and how often what was called in it.

    Args:
        moment: Where in the training it is.
        seen: What was dumped at this moment, in this pass or in one that was broken off or run again.
        counts: Whether the batch counts; otherwise nothing of it is written.

    """

    def __init__(self, moment: Moment, seen: set[tuple[str, int]], *, counts: bool = True) -> None:
        self.moment = moment
        self.seen = seen
        self.counts = counts
        self.calls: Counter[tuple[str, str]] = Counter()

    def next_call(self, kind: str, path: str) -> int:
        """Return how often this was asked before."""
        number = self.calls[kind, path]
        self.calls[kind, path] += 1
        return number


class Recorder:
    """Hands what is selected to a sink, each thing once at each moment.

    Args:
        sink: Where it goes.
        selection: What is selected.

    """

    def __init__(self, sink: Sink, selection: Selection) -> None:
        self._sink = sink
        self.selects = selection
        self._lock = threading.Lock()
        self.current: Pass | None = None
        """The pass under way."""
        self._seen: set[tuple[str, int]] = set()
        self._moment: Moment | None = None
        self._passes: set[bool] = set()

    def at(self, moment: Moment) -> None:
        """Say that a batch begins."""
        if moment != self._moment:
            self._moment, self._seen, self._passes = moment, set(), set()
        self.current = None

    def begin_pass(self, *, counts: bool = True) -> None:
        """Say that the step of the module begins, perhaps once more for the same batch."""
        if self._moment is not None:
            self._passes.add(counts)
            self.current = Pass(self._moment, self._seen, counts=counts)

    def end_batch(self) -> None:
        """Say that what comes now belongs to no batch. A batch of which no pass counted is told by :data:`NO_BATCH`."""
        if self._moment is not None and self._passes == {False}:
            self._sink.put(self._moment, NO_BATCH, torch.empty(0))
            self._passes = set()
        self.current = None

    def record(self, kind: str, path: str, nest: Any, call: int = 0, where: Pass | None = None) -> None:
        """Dump the tensors in ``nest``, in the pass under way unless told otherwise."""
        where = where or self.current
        if where is None:
            return
        for index, tensor in tensors_in(nest):
            self._put(where, f"{kind}:{path}{index}", tensor, call)

    def record_value(self, name: str, nest: Any) -> None:
        """Dump what the module's code asks for."""
        if self.current is not None and self.selects("value", name):
            self.record("value", name, nest, self.current.next_call("value", name))

    def _put(self, where: Pass, name: str, tensor: Tensor, call: int) -> None:
        if not where.counts:
            whole(tensor)  # other ranks may gather it
            return
        with self._lock:
            is_new = (name, call) not in where.seen
            where.seen.add((name, call))
        if is_new:
            self._sink.put(where.moment, name, tensor, call)

    # What is gathered.

    def record_state(self, module: Module, moment: Moment, *, keep: bool) -> None:
        """Collective in the replica. Dump parameters and buffers.

        Args:
            module: The module.
            moment: Where the training is.
            keep: Whether this rank writes them.

        """
        named: list[tuple[str, str, Tensor]] = [("parameter", name, p) for name, p in module.named_parameters()]
        named += [("buffer", name, b) for name, b in module.named_buffers()]
        self._gather(moment, named, keep=keep)

    def record_gradients(self, module: Module, optimizer: Optimizer, number: int, moment: Moment, *, keep: bool) -> None:
        """Collective in the replica. Dump the gradients and the state of an optimizer.

        Args:
            module: The module whose parameters it has.
            optimizer: The optimizer.
            number: Which of several.
            moment: Where the training is.
            keep: Whether this rank writes them.

        """
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) in own]
        gradients = [("parameter_grad", name, p.grad) for name, p in parameters if p.grad is not None]
        states = [
            ("optimizer", f"{name}.{key}", value)
            for name, parameter in parameters
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        self._gather(moment, [*gradients, *states], call=number, keep=keep)

    def _gather(self, moment: Moment, named: Iterable[tuple[str, str, Tensor]], *, keep: bool, call: int = 0) -> None:
        for kind, path, tensor in named:
            if self.selects(kind, path):
                full = gather_full(tensor.detach(), keep=keep)  # one after another: no more than one is whole at a time
                if keep:
                    self._sink.put(moment, f"{kind}:{path}", full, call)
