"""Finds out in which earlier step, and on which rank, a training went wrong: its last steps are run again."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS

from lightning_ft.elastic.checks import check_choice, check_count
from lightning_ft.loops.own_gradient import OwnGradient
from lightning_ft.loops.repeated_steps import KeptStep, StepRepeater, sends_buffers
from lightning_ft.loops.training_snapshot import TrainingSnapshot
from lightning_ft.loops.window import StepWindow
from lightning_ft.rerun.divergence import Divergence, Exactness, earliest, first_divergence
from lightning_ft.rerun.step_values import Measured
from lightning_ft.trainer.slots import gather_by_slot, is_elastic

log = logging.getLogger(__name__)

_DIED = "somebody died meanwhile, whose gradients are in their averages"


@dataclass(frozen=True)
class ReplayOptions:
    """How far back, and when, steps are run again to find where values began to be wrong.

    Every few steps parameters and optimizer state are copied; from then on the batches and random numbers of each step are
    kept, and checksums of the parameters. To run the steps again takes memory for one more copy, which is let go afterwards.
    What changes parameters otherwise than by the optimizer is told like a corruption; what callbacks do to gradients in
    ``on_before_optimizer_step`` is not repeated.

    Args:
        every_n_train_steps: Steps between two copies: so many are run again at most, and one more.
        when: ``"rejection"``: when a value is rejected that comes out the same again, so that its cause may lie in the steps
            before. ``"always"``: also before each new copy, so that every step is run twice.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is not valid.

    """

    every_n_train_steps: int = 10
    when: Literal["rejection", "always"] = "rejection"

    def __post_init__(self) -> None:
        check_count("ReplayOptions", "every_n_train_steps", self.every_n_train_steps, least=1)
        check_choice("ReplayOptions", "when", self.when, ("rejection", "always"))


class RollingReplay:
    """The steps since the newest copy of the training's state.

    Args:
        trainer: The trainer, in a fit with automatic optimization.
        pl_module: Its module.
        window: Has the step under way.
        own_gradient: Measures gradients; None if no rank has one of its own.
        options: How far back, and when.
        tolerance: By what part values may differ.
        rows: Get what comes out each time that steps are run again.

    Raises:
        MisconfigurationException: If steps of the optimizer can't be run again.

    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        window: StepWindow,
        own_gradient: OwnGradient | None,
        options: ReplayOptions,
        tolerance: float,
        rows: deque[dict[str, Any]],
    ) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS) or type(optimizer).__name__ == "ZeroRedundancyOptimizer":
                raise MisconfigurationException(
                    f"`RerunValidation(replay=...)` with `{type(optimizer).__name__}`: its steps can't be run again from a"
                    " copy of its state. Use another optimizer, or leave out `replay`."
                )
        self._trainer = trainer
        self._pl_module = pl_module
        self._window = window
        self._options = options
        self._tolerance = tolerance
        self._rows = rows
        self._exactness = Exactness()
        self._repeater = StepRepeater(trainer, pl_module, window, own_gradient)
        self._snapshot: TrainingSnapshot | None = None
        self._steps: list[KeptStep] = []
        self._end: KeptStep | None = None
        self._conditions: Any = None
        self._averaged_over: set[int] = set()  # slots
        self._sends_buffers: bool | None = None

    def begin_step(self) -> None:
        """Note how the step begins, before its first pass."""
        self._sends_buffers = sends_buffers(self._trainer)

    def end_step(self, measured: Sequence[Measured], *, is_applied: bool) -> None:
        """Collective. Keep the step under way, which is decided and not yet applied.

        Args:
            measured: Its values.
            is_applied: Whether it is about to be.

        """
        step = self._keep(measured, is_applied=is_applied)
        if not self._follows(step):
            self._begin_anew()
        elif len(self._steps) >= self._options.every_n_train_steps:
            if self._options.when == "always":
                self._search(step.without_passes())  # which are run again with those that follow
            self._begin_anew()
        if self._snapshot is not None:
            self._averaged_over |= set(getattr(self._trainer.strategy, "averaged_over", range(self._trainer.world_size)))
            self._steps.append(step)

    def end_epoch(self) -> None:
        """Note what the parameters are: at the end of a training others may put averages in their place."""
        if self._options.when == "always" and self._steps:
            self._end = self._repeater.keep([], (), sends_buffers=None, is_applied=False)

    def end_training(self) -> None:
        """Collective. Run what is left again, if all steps are to be."""
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self._pl_module.parameters())
        if is_sharded and is_elastic(self._trainer):
            return  # outside of a step nobody takes over for the ranks of a replica
        if self._end is not None and self._follows(self._end):
            self._search(self._end)

    def search(self, measured: Sequence[Measured]) -> dict[str, Any] | None:
        """Collective. Run the steps before the one under way again, and that one; return where they began to differ."""
        step = self._keep(measured, is_applied=False)
        return self._search(step) if self._follows(step) else None

    def close(self) -> None:
        """Forget all steps. May be called twice."""
        self._snapshot = None
        self._steps.clear()
        self._averaged_over = set()

    def _keep(self, measured: Sequence[Measured], *, is_applied: bool) -> KeptStep:
        return self._repeater.keep(
            self._window.micro_batches, measured, sends_buffers=self._sends_buffers, is_applied=is_applied
        )

    def _follows(self, step: KeptStep) -> bool:
        """Whether the step is the one after those that are kept, and made as they were."""
        is_next = bool(self._steps) and self._steps[-1].record.step + 1 == step.record.step
        return self._snapshot is not None and is_next and self._conditions == self._current_conditions()

    def _current_conditions(self) -> Any:
        """What must not have changed between steps that are run again together."""
        trainer = self._trainer
        return (
            getattr(trainer.strategy, "num_changes", 0),  # averages were over other ranks
            trainer.accumulate_grad_batches,
            [id(parameter) for parameter in self._pl_module.parameters() if parameter.requires_grad],
            [[len(group["params"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        )

    def _begin_anew(self) -> None:
        self.close()
        if not self._window.has_base:  # else gradients of batches before a resumption are in the step
            self._snapshot = TrainingSnapshot(self._trainer, self._pl_module)
            self._conditions = self._current_conditions()

    def _search(self, step: KeptStep) -> dict[str, Any] | None:
        """Collective. Run the steps again up to ``step``; return what came out, or None if that can't be done."""
        assert self._snapshot is not None
        trainer, steps = self._trainer, [*self._steps, step]
        numbers = [kept.record.step for kept in steps]
        mine = (trainer.global_rank, numbers, self._averaged_over, all(kept.can_be_repeated for kept in steps))
        asked = gather_by_slot(trainer, mine)
        if not all(can for _, _, _, can in asked.values()):
            self._give_up(numbers, "a batch of them was changed in place")
            return None
        if not all((theirs, over) == (numbers, {*asked}) for _, theirs, over, _ in asked.values()):
            self._give_up(numbers, _DIED)
            return None
        records = self._repeater.repeat(self._snapshot, steps)
        own = first_divergence([kept.record for kept in steps], records, self._tolerance, self._exactness)
        answers = gather_by_slot(trainer, own)
        if answers.keys() != asked.keys():
            self._give_up(numbers, _DIED)
            return None
        of_ranks = {asked[slot][0]: divergence for slot, divergence in answers.items()}
        row = _report(trainer, numbers, earliest(of_ranks))
        self._rows.append(row)
        return row

    def _give_up(self, numbers: Sequence[int], reason: str) -> None:
        if self._trainer.is_global_zero:
            log.warning("Nothing is said of steps %s to %s, which can't be run again: %s.", *_ends(numbers), reason)


def _report(trainer: Trainer, numbers: Sequence[int], found: dict[int, Divergence]) -> dict[str, Any]:
    divergence = next(iter(found.values()), None)
    row = {
        "step": numbers[-1],
        "first": numbers[0],
        "began": None if divergence is None else divergence.step,
        "ranks": sorted(found),
        "what": None if divergence is None else divergence.what,
        "value": None if divergence is None else divergence.value,
        "replayed": None if divergence is None else divergence.replayed,
        "names": [] if divergence is None else list(divergence.names),
    }
    if trainer.is_global_zero:
        events = getattr(trainer.strategy, "events", None)
        if events is not None:
            events.emit("replay", **row)
        if divergence is None:
            log.info("Steps %s to %s came out the same when they were run again.", *_ends(numbers))
        for rank, of_rank in found.items():
            log.warning("Steps %s to %s were run again: on rank %s they differ in %s.", *_ends(numbers), rank, of_rank)
    return row


def _ends(numbers: Sequence[int]) -> tuple[int, int]:
    return numbers[0], numbers[-1]
