"""The micro-batches of the optimizer step under way, so that the step can be run again from its beginning."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.nn import Parameter

from lightning_ft.loops.step_state import StepState
from lightning_ft.rerun.batches import copy_batch, copy_structure, versions

log = logging.getLogger(__name__)


@dataclass
class MicroBatch:
    """A forward and backward pass of the step under way.

    Args:
        batch: Its batch, as it was before the pass.
        arguments: What Lightning calls ``training_step`` with, by name.
        begin: The state that it began with.
        is_inner: Whether others of the same step follow.
        is_own: Whether its gradients count on this rank.
        loss: What ``training_step`` returned in the newest run; None if nothing.
        end: The state when it was over, if others follow.
        seen: The tensors that the pass itself got.
        versions: How often these had been changed before it.

    """

    batch: Any
    arguments: "OrderedDict[str, Any]"
    begin: StepState
    is_inner: bool
    is_own: bool
    loss: Tensor | None = None
    end: StepState | None = None
    seen: Any = None
    versions: list[int] = field(default_factory=list)

    @property
    def is_copy(self) -> bool:
        """Whether the batch here is another one than the pass got."""
        return self.batch is not self.seen

    @property
    def was_changed(self) -> bool:
        """Whether the pass changed its batch in place."""
        return self.versions != versions(self.seen)


class StepWindow:
    """Records the passes of each optimizer step, and runs them again.

    A rerun begins with the same batches, random numbers, buffers, metrics and logged values, and what it makes of them is
    what stays. Python attributes that ``training_step`` changes are not known here: they change once more.

    Args:
        trainer: The trainer, in a fit with automatic optimization.
        pl_module: Its module.
        on_begin: Called before the first pass of a step.
        on_abandon: Called when an exception ends a step, or it is begun anew.

    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, on_begin: Callable[[], None], on_abandon: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._on_begin, self._on_abandon = on_begin, on_abandon
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self.micro_batches: list[MicroBatch] = []
        self._base: dict[Parameter, Tensor] = {}
        self._arguments: OrderedDict[str, Any] = OrderedDict()
        self.running: MicroBatch | None = None
        """The one whose `training_step` is being called."""
        self._again: MicroBatch | None = None  # while it is run again
        self._copies = True  # until the batches of a step were left alone
        self._changes_batches = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def watch(self) -> None:
        """Begin to record."""
        run, training_step = self._loop.run, self._trainer.strategy.training_step

        def recorded_run(optimizer: Any, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> Any:
            self._arguments = kwargs
            try:
                output = run(optimizer, batch_idx, kwargs)
            except BaseException:
                self.abandon()
                raise
            if self.micro_batches and self.micro_batches[-1].is_inner:
                self.micro_batches[-1].end = StepState(self._trainer, self._pl_module)
            return output

        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            micro_batch = self.running = self._again or self._begin(args[0])
            try:
                output = training_step(*args, **kwargs)
            finally:
                self.running = None
            loss = output.get("loss") if isinstance(output, dict) else output
            micro_batch.loss = loss.detach() if isinstance(loss, Tensor) else None
            return output

        self._replace(self._loop, "run", recorded_run)
        self._replace(self._trainer.strategy, "training_step", recorded_step)

    def close(self) -> None:
        """Leave the trainer as it was. May be called twice."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            delattr(owner, name) if before is None else setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def _begin(self, batch: Any) -> MicroBatch:
        if not self.micro_batches:
            self._on_begin()
            is_first = self._arguments["batch_idx"] % self._trainer.accumulate_grad_batches == 0
            parameters = () if is_first else self._pl_module.parameters()  # of batches before a resumption
            self._base = {p: p.grad.detach().clone() for p in parameters if p.grad is not None}
        seen = copy_structure(batch)
        micro_batch = MicroBatch(
            batch=copy_batch(batch) if self._copies else seen,
            arguments=self._arguments,
            begin=StepState(self._trainer, self._pl_module),
            is_inner=self._trainer.fit_loop._should_accumulate(),
            is_own=getattr(self._trainer.strategy, "has_own_batch", True),
            seen=seen,
            versions=versions(seen),
        )
        self.micro_batches.append(micro_batch)
        return micro_batch

    @property
    def has_base(self) -> bool:
        """Whether gradients of batches before a resumption are in the step."""
        return bool(self._base)

    def index(self, micro_batch: MicroBatch) -> int | None:
        """Return which one of the step it is, from 0; None if it is somebody else's."""
        return next((i for i, own in enumerate(self.micro_batches) if own is micro_batch), None)

    @property
    def can_be_replayed(self) -> bool:
        """Whether the batches are still what they were."""
        return all(micro_batch.is_copy or not micro_batch.was_changed for micro_batch in self.micro_batches)

    def begin_last(self) -> None:
        """Note that the last pass of a step begins; if it was begun before, that is forgotten."""
        if any(not micro_batch.is_inner for micro_batch in self.micro_batches):
            self.abandon()

    def abandon(self) -> None:
        """Forget the step under way, which will not be completed."""
        if self.micro_batches:
            self.clear()
            self._on_abandon()

    def clear(self) -> None:
        """Forget the step, which is decided."""
        if not self._changes_batches and any(micro_batch.was_changed for micro_batch in self.micro_batches):
            log.info("`training_step` changes its batch in place: batches are copied, so that steps can be run again.")
            self._changes_batches = True
        self._copies = self._changes_batches
        self.micro_batches.clear()
        self._base.clear()

    def go_back(self) -> None:
        """Let everything be as it was before the first pass."""
        self.micro_batches[0].begin.restore()
        self._reset_gradients()

    def leave_no_trace(self) -> None:
        """Let everything but the random numbers be as if the passes had not been run; log nothing of the last one.

        What only hooks between the passes have changed stays.
        """
        first, now = self.micro_batches[0].begin, StepState(self._trainer, self._pl_module)
        touched: set[str] = set()
        for micro_batch in self.micro_batches:
            touched |= micro_batch.begin.changed(micro_batch.end or now)
        first.restore(leave=now.names - touched)
        now.restore_random()
        for metric in self._trainer.fit_loop.epoch_loop._results.values():
            metric._forward_cache = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self._pl_module.parameters():
            parameter.grad = None

    def _reset_gradients(self) -> None:
        for parameter in self._pl_module.parameters():
            parameter.grad = self._base[parameter].clone() if parameter in self._base else None

    def replay(self, run_last: Callable[[], Any]) -> Any:
        """Collective. Run all passes again; return what ``run_last`` returns, which runs the last one.

        A value that hooks between two passes changed keeps that change, unless the pass before came out differently.
        """
        assert self.can_be_replayed
        differing: set[str] = set()
        self._reset_gradients()
        with self._counters_kept():
            for index, micro_batch in enumerate(self.micro_batches):
                micro_batch.begin.restore(leave=differing if index else ())
                with self._with_batch(micro_batch):
                    if not micro_batch.is_inner:
                        return run_last()
                    self._run(micro_batch, is_last=False)
                if micro_batch.end is not None:
                    differing |= micro_batch.end.changed()
        raise AssertionError("a step without a last pass")

    def run_apart(self, micro_batch: MicroBatch, *, is_last: bool = False) -> Tensor | None:
        """Collective. Run a pass that is none of the step under way.

        Args:
            micro_batch: Of another step, or of another rank.
            is_last: Whether gradients are averaged with it.

        Returns:
            What it was a pass of; None if ``training_step`` returned nothing.

        """
        with self._with_batch(micro_batch):
            return self._run(micro_batch, is_last=is_last)

    def _run(self, micro_batch: MicroBatch, *, is_last: bool) -> Tensor | None:
        results = self._trainer.fit_loop.epoch_loop._results
        kept = results.batch, results.batch_size
        results.batch, results.batch_size = micro_batch.batch, None
        as_batch = getattr(self._trainer.strategy, "as_batch", None)
        standing: AbstractContextManager[None] = nullcontext() if as_batch is None else as_batch(micro_batch.is_own)
        with torch.enable_grad(), standing, _block_parallel_sync_behavior(self._trainer.strategy, block=not is_last):
            result = self._loop._training_step(micro_batch.arguments)
            if result.closure_loss is not None:
                optimizer = self._trainer.strategy._lightning_optimizers[0]
                call._call_strategy_hook(self._trainer, "backward", result.closure_loss, optimizer)
        results.batch, results.batch_size = kept
        return None if result.closure_loss is None else result.closure_loss.detach()

    @contextmanager
    def _with_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Have the pass see its batch as it was, and a further one, too."""
        name = next(iter(micro_batch.arguments))
        original = micro_batch.arguments[name]
        fresh = copy_batch(micro_batch.batch) if micro_batch.is_copy else copy_structure(micro_batch.batch)
        micro_batch.arguments[name] = fresh
        self._again = micro_batch
        try:
            yield
        finally:
            self._again = None
            micro_batch.arguments[name] = original

    @contextmanager
    def _counters_kept(self) -> Iterator[None]:
        """Count a step once, however often its gradients are zeroed."""
        progress = self._loop.optim_progress.optimizer.zero_grad
        before = deepcopy(progress.state_dict())
        try:
            yield
        finally:
            progress.load_state_dict(before)
