"""The values of each step that are validated: the losses, and the norm of the gradient."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ft.rerun.baseline import Baseline, Judgement
from lightning_ft.rerun.state_machine import RerunStateMachine

log = logging.getLogger(__name__)

LOSS, NORM = "loss", "gradient norm"
OVERFLOW = "gradient norm overflows in half precision"
"""A GradScaler does not apply such gradients, but lowers its scale."""
_PATIENCE = 10


def as_numbers(values: Sequence[Tensor]) -> list[float]:
    """Return tensors of one element as numbers, all at once: each would wait for the device."""
    numbers: list[float] = torch.stack([v.detach().double().reshape(()) for v in values]).tolist() if values else []
    return numbers


class StepValidation:
    """Tells what losses and gradient norms are usual, and has those of each step validated against that.

    Args:
        tolerance: By what part two runs of a step may differ.

    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._baselines = {LOSS: Baseline(), NORM: Baseline()}
        self._newest: list[tuple[str, float]] = []

    def validate(
        self,
        machine: RerunStateMachine,
        losses: Sequence[tuple[int, Tensor]],
        norm: Tensor | None,
        *,
        scale: float | None,
    ) -> None:
        """Have the values of a pass validated.

        Args:
            machine: Validates them.
            losses: Those of the micro-batches that count on this rank, each with its place in the step.
            norm: Of the averaged gradient, the same on all ranks; None if there is none.
            scale: By how much a GradScaler has the gradient too large; None without one.

        """
        numbers = as_numbers([*(loss for _, loss in losses), *([] if norm is None else [norm])])
        measured: list[tuple[str, float, int | None]] = [
            (LOSS, number, place) for number, (place, _) in zip(numbers, losses, strict=False)
        ]
        may_overflow = scale is not None and all(math.isfinite(number) for _, number, _ in measured)
        if norm is not None:
            measured.append((NORM, numbers[-1] / (scale or 1.0), None))
        self._newest = [(name, number) for name, number, _ in measured]
        for name, number, place in measured:
            self._validate_one(machine, name, number, place, may_overflow=may_overflow and name == NORM)

    def _validate_one(
        self, machine: RerunStateMachine, name: str, number: float, place: int | None, *, may_overflow: bool
    ) -> None:
        judgement: Judgement = self._baselines[name].judge(number)
        tolerance, shared = self._tolerance, name == NORM
        machine.validate_result(
            number,
            lambda value: not math.isfinite(value),
            OVERFLOW if may_overflow else name,
            tolerance=tolerance,
            fatal=not may_overflow,
            expected="a finite number",
            shared=shared,
            micro_batch=place,
        )
        machine.validate_result(
            number,
            lambda value: judgement.kind == "spike",
            f"{name} is unexpectedly large",
            tolerance=tolerance,
            fatal=False,
            expected=f"at most {judgement.high:.6g}",
            shared=shared,
            micro_batch=place,
        )

    def accept(self) -> None:
        """Remember the values of the newest pass, unless they are bad: it was applied."""
        for name, number in self._newest:
            if not math.isfinite(number):
                continue
            baseline = self._baselines[name]
            baseline.observe(number)
            if baseline.num_flagged_in_a_row >= _PATIENCE:
                log.warning(
                    "The %s was unexpectedly large, and correct, for %s steps: from now on that is usual.", name, _PATIENCE
                )
                baseline.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, as plain data."""
        return {name: baseline.state_dict() for name, baseline in self._baselines.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        for name, baseline in self._baselines.items():
            baseline.load_state_dict(state[name])
