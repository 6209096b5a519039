"""One value of a training, such as its loss, and whether what comes after a restart goes on from what was before."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from lightning_ft.rerun.baseline import Baseline

Outcome = Literal["continuous", "spike", "drop", "nan", "undecided"]

_MEMORY = 512  # steps that a rollback may go back and still be judged by what was before
_FAR = 2.0  # times the upper end of the usual range
_HEADS = (5, 3)  # first steps, which are looked at by themselves, too: a training may recover soon
_MANY = 5  # values of which one in ten may be usual
_FEW = 3  # values that are too few to have a median


@dataclass(frozen=True)
class Finding:
    """What values after a restart are.

    Args:
        outcome: In a word.
        usual: The median before; None if too few values are known.
        value: What is at odds with it, or the median after.

    """

    outcome: Outcome
    usual: float | None
    value: float


class Series:
    """The values that are usual, and those that enter them.

    Args:
        baseline: Of such values.
        drops: Whether it matters if they drop.
        window: How many values after a restart are compared with how many before.

    """

    def __init__(self, baseline: Baseline, *, drops: bool, window: int) -> None:
        self._baseline = baseline
        self._drops = drops
        self._window = window
        self._entered: deque[tuple[int, float]] = deque(maxlen=_MEMORY)

    def enter(self, step: int, value: float) -> bool:
        """Remember a value unless it is unusual; return whether it is remembered."""
        if self._baseline.observe(value).is_bad:
            return False
        self._entered.append((step, value))
        return True

    def forget(self) -> None:
        """Begin anew."""
        self._baseline.forget()
        self._entered.clear()

    def go_back(self, step: int) -> None:
        """Let what is usual be what it was at ``step``."""
        while self._entered and self._entered[-1][0] > step:
            self._entered.pop()
        values = [value for _, value in self._entered]
        self._baseline.load_state_dict({**self._baseline.state_dict(), "values": values})

    def is_ruled_out(self, values: Sequence[float], tolerance: float) -> bool:
        """Whether no further value could make these, of which the last one is new, go on from those before."""
        return self._baseline.judge(values[-1]).is_bad and self._find_bad(values, tolerance) is not None

    def compare(self, values: Sequence[float], tolerance: float) -> Finding:
        """Compare values after a restart, at least one, with those before.

        Args:
            values: All of them so far.
            tolerance: A factor by which they may be larger for a reason.

        """
        bad = self._find_bad(values, tolerance)
        if bad is not None:
            return bad
        middle = median(values)
        usual = self._baseline.judge(middle).usual
        if usual is None:
            return Finding("undecided", None, middle)
        before = [value for _, value in self._entered][-2 * self._window :]
        heads = [values[begin : begin + size] for size in _HEADS for begin in (0, 1)]  # it may begin one step later
        for part in (values, *heads):
            if _moved(before, [value / tolerance for value in part], 1.0 + self._baseline.jump):
                return Finding("spike", usual, median(part))
        if self._drops and _moved(before, values, 1.0 - self._baseline.jump):
            return Finding("drop", usual, middle)
        return Finding("continuous", usual, middle)

    def _find_bad(self, values: Sequence[float], tolerance: float) -> Finding | None:
        """Return what single values say."""
        for value in values:
            if not math.isfinite(value):
                return Finding("nan", self._baseline.judge(0.0).usual, value)
        judged = [(value, found) for value in values if (found := self._baseline.judge(value / tolerance)).kind == "spike"]
        if not judged:
            return None
        # One value above the range happens by itself once in ten thousand steps; that of the restart stands further out,
        # or not alone. During the warm-up only one is above it that is absurd.
        worst, found = max(judged, key=lambda pair: pair[0])
        usual = found.usual
        if len(judged) > 1 or usual is None or worst / tolerance > usual + _FAR * (found.high - usual):
            return Finding("spike", usual, worst)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen; plain data."""
        return {"baseline": self._baseline.state_dict(), "entered": [list(pair) for pair in self._entered]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen."""
        self._baseline.load_state_dict(state["baseline"])
        self._entered = deque([(int(step), float(value)) for step, value in state["entered"]], maxlen=_MEMORY)


def _moved(before: Sequence[float], after: Sequence[float], factor: float) -> bool:
    """Whether the median moved by ``factor`` at least, and values before and after hardly overlap.

    A fall that was under way already is no move: it is taken to go on as fast.
    """
    half = len(before) // 2
    older, newer = before[:half], before[half:]
    if len(after) < _FEW or len(newer) < _FEW or min(*before, *after) <= 0.0:
        return False
    usual = median(newer)
    if factor < 1.0:
        fall = min(1.0, usual / median(older))
        return median(after) < factor * fall * usual and _part(after, 0.9) < fall * _part(newer, 0.1)
    if len(after) < _MANY:  # as many in a row are that large by themselves now and then: none was, for long
        return median(after) > factor * usual and min(after) > max(before)
    return median(after) > factor * usual and _part(after, 0.1) > _part(newer, 0.9)


def _part(values: Sequence[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]
