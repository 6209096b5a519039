"""How backward passes become optimizer steps: which of them are averaged, and what each average stands for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.strategies.live_training import LiveTraining
from lightning_ft.strategies.module_parameters import ModuleParameters
from lightning_ft.strategies.reduction import GradientReducer, Reduced
from lightning_ft.strategies.step_checks import agree_on_loss, check_all_used
from lightning_ft.strategies.step_traces import StepTraces


class TrainingSteps:
    """The steps of one fit.

    Args:
        pl_module: The module that is trained.
        parameters: Its parameters.
        reducer: Averages their gradients.
        live: The Trainer call.
        engine: Of the job.
        collectives: Of the live ranks.
        find_unused_parameters: Whether a step may leave parameters without a gradient.
        recover: Makes a sharded module usable after an exception in the middle of a step; None if it is not sharded.

    """

    def __init__(
        self,
        pl_module: LightningModule,
        parameters: ModuleParameters,
        reducer: GradientReducer,
        live: LiveTraining,
        engine: Engine,
        collectives: Collectives,
        *,
        find_unused_parameters: bool,
        recover: Callable[[], None] | None = None,
    ) -> None:
        self._recover = recover
        self._pl_module = pl_module
        self._parameters = parameters
        self._reducer = reducer
        self._live = live
        self._engine = engine
        self._collectives = collectives
        self._find_unused_parameters = find_unused_parameters
        self._synchronize = True
        self._micro_batches: list[bool] = []  # since the last average: whether each counts
        self._num_extra = 0  # batches of missing replicas in the same time, which this rank ran
        self._reduced: Reduced | None = None
        self._is_repeating = False
        self.checked: Callable[[Callable[[], Any]], Callable[[], Any]] = lambda closure: closure
        """Wraps what ends with averaged gradients, which it may run several times, alike on all ranks."""

    def close(self) -> None:
        """Take the hooks off the parameters. May be called twice."""
        self._reducer.close()
        self._parameters.close()

    @property
    def synchronizes_buffers(self) -> bool:
        """Whether a forward pass now is one after which ``ddp`` sends buffers again."""
        # In manual optimization `ddp` sends them before the first batch only.
        return self._synchronize and self._pl_module.automatic_optimization

    @property
    def may_pause(self) -> bool:
        """Whether the state is whole: no gradient waits to be averaged."""
        return not self._micro_batches

    @property
    def window(self) -> list[bool] | None:
        """Whether each batch since the last average counts; None if another fit can't go on within a window."""
        if self._live.extra is not None or self._recover is not None or not self._pl_module.automatic_optimization:
            return None
        return list(self._micro_batches)

    def take_up(self, window: Sequence[bool]) -> None:
        """Go on within a window whose gradients are there already."""
        self._micro_batches = list(window)
        self._reducer.take_up()

    @property
    def averaged_over(self) -> tuple[int, ...]:
        """Slots whose gradients are in the newest average."""
        return () if self._reduced is None else self._reduced.members

    @property
    def _is_automatic(self) -> bool:
        """Whether every optimizer step follows from one reduction."""
        return self._pl_module.automatic_optimization and not self._pl_module.trainer.fit_loop._skip_backward

    def look_with(self, look: Callable[[Tensor | None], None] | None) -> None:
        """Have ``look`` called while gradients are reduced."""
        self._reducer.while_reducing = look

    def take_average_norm(self) -> Tensor | None:
        """Return, once, the norm of the averaged gradient, if it was looked at and is what it was."""
        return self._reducer.average_norm.take(self._pl_module.parameters())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let passes be nobody's: their gradients do not stay, and nothing of them is counted or averaged."""
        window, self._micro_batches = self._micro_batches, []
        synchronize, self._synchronize = self._synchronize, False
        try:
            with self._reducer.ghost_backward():
                yield
        finally:
            self._micro_batches, self._synchronize = window, synchronize

    @contextmanager
    def repeating(self) -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
        """Collective. Average as ever, but let nothing follow from it: the passes are those of steps that are over.

        Yields what wraps the last pass of such a step.
        """
        window, self._micro_batches = self._micro_batches, []
        num_extra, self._num_extra, reduced = self._num_extra, 0, self._reduced
        if self._live.memory is not None:
            self._live.memory.fence()
        self._is_repeating = True
        try:
            yield self._reducing
        finally:
            self._is_repeating = False
            self._micro_batches, self._num_extra, self._reduced = window, num_extra, reduced

    def abandon(self) -> None:
        """Forget the window under way, whose gradients are gone."""
        self._synchronize = True
        self._micro_batches.clear()
        self._num_extra = 0
        self._reduced = None

    @contextmanager
    def without_synchronization(self) -> Iterator[None]:
        """Keep gradients local: the window of accumulation is not over."""
        before, self._synchronize = self._synchronize, False
        num_micro_batches = len(self._micro_batches)
        try:
            yield
            if len(self._micro_batches) == num_micro_batches and self._is_automatic:
                self._micro_batches.append(False)  # `training_step` returned None
                self._end_passes()
        finally:
            self._synchronize = before

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[Tensor]:
        """Collective, at the end of a window. Run the backward pass of the loss that this yields inside."""
        if self._live.memory is not None:
            self._live.memory.poll()
        is_own, extra = self._live.has_own_batch, self._live.extra
        is_extra = extra is not None and extra.is_running
        if is_extra:
            self._num_extra += is_own
        else:
            self._micro_batches.append(is_own)
        self._reducer.follow(self._parameters)
        if self._synchronize and (extra is None or extra.is_over):
            self._arm()
        with nullcontext() if is_own else self._reducer.ghost_backward():
            yield loss if is_own else loss * 0.0
        if not is_extra:
            self._end_passes()

    def enter(self) -> None:
        """Take part in the steps of automatic optimization, whenever the module's ``optimizer_step`` runs the closure."""
        loop: Any = self._live.trainer.fit_loop.epoch_loop.automatic_optimization
        step = type(loop)._optimizer_step.__get__(loop)

        def optimizer_step(batch_idx: int, closure: Callable[[], Any]) -> None:
            is_automatic = self._is_automatic
            step(batch_idx, self._redoing(self.checked(self._reducing(closure))) if is_automatic else closure)
            if is_automatic:
                self._commit(self._live.trainer.global_step)

        loop._optimizer_step = optimizer_step

    def wrap(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what ``optimizer`` is to call instead of ``closure``."""
        if isinstance(optimizer, LBFGS):  # decides by the loss how often it calls the closure, and how far it goes
            closure = agree_on_loss(closure, self._collectives)
        return closure

    def stepped(self) -> None:
        """Take note that an optimizer stepped."""
        if not self._is_automatic:
            self._commit(self._live.trainer.global_step + 1)

    def _commit(self, step: int) -> None:
        self._live.commits.stepped(step)
        self._engine.report_progress(step)

    def end_batch(self) -> None:
        """Collective. Let a batch that averaged no gradients in manual optimization be a step boundary all the same."""
        live = self._live
        if self._is_automatic or live.has_reduced:
            return
        if not self._micro_batches or live.is_last_batch:
            label = f"end of batch {live.batch} without gradients"
            live.after_reduction(self._reducer.agree(stop=live.preemption.asked, label=label))

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Make ``closure`` take part in the reduction even if ``training_step`` returns None.

        If it does so on all ranks there is no gradient anywhere, as on a single device; else this one applies the others'.
        """

        def reducing() -> Any:
            self._reduced = None
            loss = closure()
            reduced = self._reduced
            if reduced is None:
                self._micro_batches.append(False)
                self._end_passes()
                reduced = self._reduced
            assert reduced is not None
            if not reduced.contributors:
                return None
            return torch.zeros((), device=self._pl_module.device) if loss is None else loss

        return reducing

    def _redoing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Have ``closure`` begin again in another replica when this rank loses its own; the others wait for it."""
        recover = self._recover
        if recover is None or self._live.extra is not None:  # or the others have taken over what this rank ran
            return closure

        def redoing() -> Any:
            traces = StepTraces(self._live.trainer.fit_loop.epoch_loop._results, self._pl_module)
            num_micro_batches = len(self._micro_batches)

            def undo() -> None:
                if num_micro_batches:  # their gradients are those of the replica that is lost
                    self._engine.retire()
                recover()
                traces.undo()
                self._micro_batches.clear()

            return self._engine.redo(closure, undo)

        return redoing

    def _end_passes(self) -> None:
        """Collective, at the end of a window. Run what else belongs to the batch, and average if the window is over."""
        if self._live.extra is not None and self._is_automatic:
            self._live.extra.run()
        if not self._synchronize:
            self._engine.activity.enter("callbacks")
            return
        if not self._reducer.is_armed:  # no backward pass was the last one to come
            self._reducer.follow(self._parameters)
            self._arm()
        self._finish_reduction()

    def _arm(self) -> None:
        weight, total = sum(self._micro_batches) + self._num_extra, len(self._micro_batches)
        label = f"gradients of batch {self._live.batch}"
        self._reducer.arm(weight, total, stop=self._live.preemption.asked, label=label)

    def _finish_reduction(self) -> Reduced:
        reduced = self._reducer.finish()
        while not reduced.is_whole:
            assert self._live.extra is not None
            self._live.extra.take_over(reduced.members)
            self._arm()
            reduced = self._reducer.finish()
        self._reduced = reduced
        if not reduced.contributors and self._is_automatic:  # also not those of batches that do not count
            for parameter in self._reducer.parameters:
                parameter.grad = None
        self._micro_batches.clear()
        self._num_extra = 0
        if self._is_repeating:
            return reduced
        if self._is_automatic and not self._find_unused_parameters:
            check_all_used(self._pl_module, reduced.unused)
        self._live.after_reduction(reduced)
        return reduced
