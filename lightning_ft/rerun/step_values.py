"""The values of each step that are validated: the losses, and the norms of the gradient, each rank's own and the average."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ft.rerun.baseline import Baseline, Judgement
from lightning_ft.rerun.findings import PARAMETER_NORM
from lightning_ft.rerun.state_machine import RerunStateMachine

log = logging.getLogger(__name__)

LOSS, OWN_NORM, NORM = "loss", "own gradient norm", "gradient norm"
OVERFLOW = "overflows in half precision"
"""What is said of norms that a GradScaler does not let be applied; it lowers its scale."""
_PATIENCE = 10


def new_baselines() -> dict[str, Baseline]:
    """Return what tells of each value what is usual, by its name."""
    # Of a rank's few samples it varies more than of all: a small GPT has three times the usual once in some 4,000 steps.
    norms = {OWN_NORM: Baseline(jump=4.0), NORM: Baseline.of_norms(), PARAMETER_NORM: Baseline.of_norms()}
    return {LOSS: Baseline(), **norms}


@dataclass(frozen=True)
class Measured:
    """A value of a step.

    Args:
        name: Which.
        value: The value.
        micro_batch: Of which micro-batch of the step, from 0; None: of the whole step.
        may_overflow: Whether it is a norm that a GradScaler sees to if it is not finite.

    """

    name: str
    value: float
    micro_batch: int | None = None
    may_overflow: bool = False


def measure(
    losses: Sequence[tuple[int, Tensor]], norm: Tensor | None, own_norm: Tensor | None, scale: float | None
) -> list[Measured]:
    """Return the values of a pass.

    Args:
        losses: Those of the micro-batches that count on this rank, each with its place in the step.
        norm: Of the averaged gradient, the same on all ranks; None if there is none.
        own_norm: Of this rank's own gradient; None if it is the same or not known.
        scale: By how much a GradScaler has the gradient too large; None without one.

    """
    norms = [(name, value) for name, value in ((OWN_NORM, own_norm), (NORM, norm)) if value is not None]
    tensors = [*(loss for _, loss in losses), *(value for _, value in norms)]
    # All at once: each would wait for the device.
    numbers = torch.stack([t.detach().double().reshape(()) for t in tensors]).tolist() if tensors else []
    measured = [Measured(LOSS, number, place) for number, (place, _) in zip(numbers, losses, strict=False)]
    may_overflow = scale is not None and all(math.isfinite(loss.value) for loss in measured)
    for (name, _), number in zip(norms, numbers[len(losses) :], strict=True):
        measured.append(Measured(name, number / (scale or 1.0), may_overflow=may_overflow))
    return measured


class StepValidation:
    """Tells what losses and gradient norms are usual, and has those of each step validated against that.

    Args:
        tolerance: By what part two runs of a step may differ.

    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._baselines = new_baselines()
        self._newest: Sequence[Measured] = ()

    def validate(self, machine: RerunStateMachine, measured: Sequence[Measured]) -> None:
        """Have what was measured in a pass validated."""
        self._newest = measured
        for value in measured:
            self._validate_one(machine, value)

    def _validate_one(self, machine: RerunStateMachine, measured: Measured) -> None:
        name, shared = measured.name, measured.name == NORM
        judgement: Judgement = self._baselines[name].judge(measured.value)
        machine.validate_result(
            measured.value,
            lambda value: not math.isfinite(value),
            f"{name} {OVERFLOW}" if measured.may_overflow else name,
            tolerance=self.tolerance,
            fatal=not measured.may_overflow,
            expected="a finite number",
            shared=shared,
            micro_batch=measured.micro_batch,
        )
        machine.validate_result(
            measured.value,
            lambda value: judgement.kind == "spike",
            f"{name} is unexpectedly large",
            tolerance=self.tolerance,
            fatal=False,
            expected=f"at most {judgement.high:.6g}",
            shared=shared,
            micro_batch=measured.micro_batch,
        )

    def accept(self) -> None:
        """Remember the values of the newest pass, unless they are bad: it was applied."""
        for measured in self._newest:
            if not math.isfinite(measured.value):
                continue
            name, baseline = measured.name, self._baselines[measured.name]
            baseline.observe(measured.value)
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
            if name in state:
                baseline.load_state_dict(state[name])
