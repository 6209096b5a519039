"""What the ranks tell each other of their last steps: one row of numbers each, from which all know the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from statistics import median
from typing import Any

import torch

_FIELDS = 5  # steps since, loss, its weight, norm, flags
_HEADER = 2
_THERE = 1 << 10  # beside the reasons: this rank took part in the step
_NO_NORM = -1.0


class Reason(IntFlag):
    """Why the training was interrupted before a step."""

    DEATH = 1
    REJOIN = 2
    RESUME = 4
    ROLLBACK = 8

    @property
    def text(self) -> str:
        """Return it as text."""
        return "+".join(reason.name.lower() for reason in type(self) if reason & self and reason.name)


@dataclass(frozen=True)
class StepValues:
    """A step, as all ranks know it.

    Args:
        step: How many steps are done with it.
        loss: Mean over the batches of all ranks; None if there is none.
        grad_norm: None if it is not known.
        reasons: What interrupted the training before it.

    """

    step: int
    loss: float | None
    grad_norm: float | None
    reasons: Reason

    @property
    def known(self) -> dict[str, float]:
        """Return the values that there are, by name."""
        named = {"loss": self.loss, "grad_norm": self.grad_norm}
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        return f"step {self.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in self.known.items())


@dataclass
class _OwnStep:
    step: int
    losses: list[Any]
    norm: Any
    reasons: Reason


@dataclass(frozen=True)
class Exchanged:
    """What the rows of all ranks say.

    Args:
        steps: Those since the last exchange.
        seconds: What each slot's own part of a step takes, the median; without those that do not know.

    """

    steps: list[StepValues]
    seconds: dict[int, float]


@dataclass
class OwnSteps:
    """This rank's steps since the last exchange. Losses and norms may be tensors on a device, which are read then.

    Args:
        capacity: The most steps that are told; older ones are left out.

    """

    capacity: int
    steps: list[_OwnStep] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, step: int, losses: Sequence[Any], norm: Any, reasons: Reason) -> None:
        """Add a step; ``losses`` are those of its batches that count on this rank."""
        self.steps.append(_OwnStep(step, list(losses), norm, reasons))
        del self.steps[: -self.capacity]

    def clear(self) -> None:
        """Forget them."""
        self.steps.clear()
        self.seconds.clear()

    def row(self, slot: int, step: int) -> list[float]:
        """Return what this rank tells at ``step``; the last step comes last, so that rows of a late rank fit, too."""
        values = iter(_read([value for own in self.steps for value in (*own.losses, own.norm)]))
        row = [float(slot), median(self.seconds) if self.seconds else math.nan]
        row += [0.0] * (_FIELDS * (self.capacity - len(self.steps)))
        for own in self.steps:
            losses = [next(values) for _ in own.losses]
            norm = next(values)
            mean = math.fsum(losses) / len(losses) if losses else 0.0
            row += [float(step - own.step), mean, float(len(losses)), norm, float(own.reasons | _THERE)]
        return row


def merge(rows: Sequence[Sequence[float]], step: int) -> Exchanged:
    """Return what the rows that all ranks told at ``step`` say."""
    seconds = {int(row[0]): row[1] for row in rows if not math.isnan(row[1])}
    steps = []
    for start in range(_HEADER, len(rows[0]), _FIELDS):
        parts = [row[start : start + _FIELDS] for row in rows]
        there = [part for part in parts if int(part[4]) & _THERE]
        if not there:
            continue
        flags = 0
        for part in there:
            flags |= int(part[4])
        weight = sum(part[2] for part in there)
        loss = sum(part[1] * part[2] for part in there if part[2]) / weight if weight else None
        norm = there[0][3]
        steps.append(StepValues(step - int(there[0][0]), loss, None if norm == _NO_NORM else norm, Reason(flags & ~_THERE)))
    return Exchanged(steps, seconds)


def _read(values: list[Any]) -> list[float]:
    """Return numbers; those on a device with one transfer."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    read = iter(torch.stack([value.detach().float().reshape(()) for value in tensors]).tolist() if tensors else ())
    numbers = [next(read) if isinstance(value, torch.Tensor) else value for value in values]
    return [_NO_NORM if number is None else float(number) for number in numbers]
