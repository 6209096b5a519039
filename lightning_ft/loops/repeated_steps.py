"""Steps of some time ago that are run again, with what they change kept apart from the training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric

from lightning_ft.loops.measured_pass import measure_pass
from lightning_ft.loops.own_gradient import OwnGradient
from lightning_ft.loops.step_state import StepState
from lightning_ft.loops.training_snapshot import (
    Settings,
    TrainingSnapshot,
    load_scaler_state,
    load_settings,
    scaler_state,
    settings_of,
)
from lightning_ft.loops.window import MicroBatch, StepWindow
from lightning_ft.rerun.divergence import StepRecord
from lightning_ft.rerun.replica_state import digests, named_state
from lightning_ft.rerun.step_values import Measured

LastPass = Callable[[], Any]


@dataclass(frozen=True)
class KeptStep:
    """All that running a step again takes, beside the state before the first one.

    Args:
        record: What is to come out.
        micro_batches: Its micro-batches.
        settings: Learning rates and the like.
        scaler: The GradScaler's state.
        progress: Steps and epochs before it.
        sends_buffers: Whether it began with the buffers of rank 0.
        is_applied: Whether its gradient was applied.

    """

    record: StepRecord
    micro_batches: Sequence[MicroBatch]
    settings: Settings
    scaler: dict[str, Any] | None
    progress: tuple[int, int]
    sends_buffers: bool | None
    is_applied: bool

    @property
    def is_own(self) -> bool:
        """Whether its gradient is, before the average, this rank's own."""
        return bool(self.micro_batches) and self.micro_batches[-1].is_own

    def without_passes(self) -> "KeptStep":
        """Return what only the parameters before it are compared of."""
        return replace(self, record=replace(self.record, measured=()), micro_batches=())

    @property
    def can_be_repeated(self) -> bool:
        """Whether its batches are still what they were."""
        return all(micro_batch.is_copy or not micro_batch.was_changed for micro_batch in self.micro_batches)


class StepRepeater:
    """Keeps steps and runs them again.

    Args:
        trainer: The trainer, in a fit with automatic optimization.
        pl_module: Its module.
        window: Runs single passes.
        own_gradient: Measures gradients; None if no rank has one of its own.

    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, window: StepWindow, own_gradient: OwnGradient | None
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._window = window
        self._own_gradient = own_gradient

    def keep(
        self,
        micro_batches: Sequence[MicroBatch],
        measured: Sequence[Measured],
        *,
        sends_buffers: bool | None,
        is_applied: bool,
    ) -> KeptStep:
        """Return a step whose gradient is final and about to be applied, or not to be."""
        trainer = self._trainer
        return KeptStep(
            record=self._record(trainer.global_step + 1, measured),
            micro_batches=[copy(micro_batch) for micro_batch in micro_batches],  # a rerun leaves its loss in them
            settings=settings_of(trainer.optimizers),
            scaler=scaler_state(trainer),
            progress=self._progress,
            sends_buffers=sends_buffers,
            is_applied=is_applied,
        )

    def repeat(self, snapshot: TrainingSnapshot, steps: Sequence[KeptStep]) -> list[StepRecord]:
        """Collective. Run ``steps`` again from ``snapshot``, the last one without applying it; return what came out."""
        with self._apart() as averaged, snapshot.in_place():
            records = [self._run(step, averaged, is_last=step is steps[-1]) for step in steps]
        return records

    def _run(self, step: KeptStep, averaged: Callable[[LastPass], LastPass], *, is_last: bool) -> StepRecord:
        trainer = self._trainer
        optimizer = trainer.optimizers[0]  # in automatic optimization there is no other one
        measured: list[Measured] = []

        def passes() -> Any:
            output = self._run_passes(step, averaged)
            own_norm = None if self._own_gradient is None or not step.is_own else self._own_gradient.norm
            measured.extend(measure_pass(trainer, self._pl_module, step.micro_batches, own_norm))
            return output

        load_settings(trainer.optimizers, step.settings)
        load_scaler_state(trainer, step.scaler)
        self._progress = step.progress
        record = self._record(step.record.step, measured)  # the parameters are those that the step begins with
        if step.is_applied and not is_last:
            trainer.precision_plugin.optimizer_step(optimizer, model=self._pl_module, closure=passes)
        elif step.micro_batches:
            passes()
        return record

    def _run_passes(self, step: KeptStep, averaged: Callable[[LastPass], LastPass]) -> Any:
        for parameter in self._pl_module.parameters():
            parameter.grad = None
        set_sends_buffers(self._trainer, step.sends_buffers)
        output = None
        for micro_batch in step.micro_batches:
            micro_batch.begin.restore()
            if micro_batch.is_inner:
                self._window.run_apart(micro_batch)
                continue
            last: LastPass = averaged(lambda last=micro_batch: self._window.run_apart(last, is_last=True))  # type: ignore[misc]
            output = last() if self._own_gradient is None else self._own_gradient.measuring(last)()
        return output

    def _record(self, step: int, measured: Sequence[Measured]) -> StepRecord:
        return StepRecord(step, digests(named_state(self._pl_module, ())[0], {}), measured)

    @property
    def _progress(self) -> tuple[int, int]:
        fit_loop = self._trainer.fit_loop
        steps = fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        return steps, fit_loop.epoch_progress.current.completed

    @_progress.setter
    def _progress(self, progress: tuple[int, int]) -> None:
        fit_loop = self._trainer.fit_loop
        optimizer = fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        optimizer.step.total.completed, fit_loop.epoch_progress.current.completed = progress

    @contextmanager
    def _apart(self) -> Iterator[Callable[[LastPass], LastPass]]:
        """Keep the training as it is, whatever passes and optimizers do inside; log nothing, call no callback's hook."""
        trainer: Any = self._trainer
        strategy, precision, epoch_loop = trainer.strategy, trainer.precision_plugin, trainer.fit_loop.epoch_loop
        for callback in trainer.callbacks:
            getattr(callback, "wait_for_copy", lambda: None)()  # a save may still read what is about to change
        before, progress, results = StepState(trainer, self._pl_module), self._progress, epoch_loop._results
        metrics = [module for module in self._pl_module.modules() if isinstance(module, Metric)]
        computed = [(metric, metric._computed, metric._forward_cache) for metric in metrics]
        sends = sends_buffers(trainer)
        epoch_loop._results = _ResultCollection(training=True)
        precision._after_closure = self._after_closure
        try:
            with ExitStack() as stack:
                averaged = stack.enter_context(strategy.repeating()) if hasattr(strategy, "repeating") else _as_it_is
                yield averaged
        finally:
            del precision._after_closure
            epoch_loop._results = results
            for metric, value, cache in computed:
                metric._computed, metric._forward_cache = value, cache
            set_sends_buffers(trainer, sends)
            self._progress = progress
            before.restore()

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """What Lightning does between the gradient and its application, without the callbacks."""
        trainer = self._trainer
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        trainer.precision_plugin._clip_gradients(
            model, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
        )


def sends_buffers(trainer: Trainer) -> bool | None:
    """Return whether the next forward pass begins with the buffers of rank 0; None if that never happens."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "sends_buffers"):
        return bool(strategy.sends_buffers)
    return getattr(strategy.model, "require_forward_param_sync", None)


def set_sends_buffers(trainer: Trainer, sends: bool | None) -> None:
    """Let the next forward pass begin with them, or not."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "sends_buffers"):
        strategy.sends_buffers = sends
    elif sends is not None:
        strategy.model.require_forward_param_sync = sends


def _as_it_is(last_pass: LastPass) -> LastPass:
    return last_pass
