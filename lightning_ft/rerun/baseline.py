"""What a value of the training is usually like, so that one that is not is seen before it does harm."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ft.elastic.checks import check_count

_WILD = 1000.0
_FLOOR = 0.01


@dataclass(frozen=True)
class Judgement:
    """What a `Baseline` says of a value.

    Args:
        kind: ``"fine"``: within the expected range. ``"spike"``, ``"drop"``: above, below it. ``"nan"``, ``"inf"``: not
            finite. ``"undecided"``: finite, and too few values were seen before to say more.
        value: The value.
        usual: The median of the values before; None if undecided.
        low: Lower end of the expected range; minus infinity if undecided.
        high: Upper end of it; before the warm-up is over a thousand times the largest value.

    """

    kind: Literal["fine", "spike", "drop", "nan", "inf", "undecided"]
    value: float
    usual: float | None
    low: float
    high: float

    @property
    def is_bad(self) -> bool:
        """Whether the value should not be trusted unseen: it is a spike or not finite."""
        return self.kind in ("spike", "nan", "inf")

    def __str__(self) -> str:
        if self.usual is None:
            return f"{self.value:.6g} ({self.kind}; too few values before)"
        return f"{self.value:.6g} ({self.kind}; usual {self.usual:.6g}, expected {self.low:.6g} to {self.high:.6g})"


class Baseline:
    """The usual range of a value that a training has at every step: a loss, the norm of a gradient.

    A value is judged by those before it, of which the last ``window`` that were no spikes and finite are kept. It is a
    spike if it lies further above their median than all of these: ``scatters`` times their scatter, ``jump`` times the
    median, twice the distance of the largest of them. So heavy tails, plateaus and constant values raise no alarm. What was
    flagged never enters: a divergence does not become the usual by going on. Drops do enter, since a learning rate that
    drops lets losses drop for good.

    Args:
        scatters: How many times its usual scatter a value may lie away from the usual one. Two thirds of all values lie
            within one scatter.
        jump: A value that is larger by less than this part of the usual one is no spike, however small the scatter is;
            0.5: half as large again.
        window: How many values are remembered.
        warm_up: How many values must have been seen before any is called a spike; until then only one is that is a
            thousand times larger than all before it.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Example::

        baseline = Baseline()
        for loss in losses:
            judgement = baseline.observe(loss)
            if judgement.is_bad:
                print(f"Loss {judgement}.")

    """

    def __init__(self, *, scatters: float = 10.0, jump: float = 0.5, window: int = 128, warm_up: int = 20) -> None:
        for name, value in (("scatters", scatters), ("jump", jump)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"`Baseline({name}={value!r})` is not valid: expected a number greater than 0.")
        check_count("Baseline", "window", window, least=8)
        check_count("Baseline", "warm_up", warm_up, least=2)
        if warm_up > window:
            raise ValueError(f"`Baseline(warm_up={warm_up})` is not valid: expected at most `window`, which is {window}.")
        self.scatters = float(scatters)
        self.jump = float(jump)
        self.window = window
        self.warm_up = warm_up
        self.num_flagged_in_a_row = 0
        """How many values were bad since the last one that was not."""
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._highest_usual = 0.0

    @classmethod
    def of_norms(cls) -> "Baseline":
        """Return one for norms of gradients, which vary more than losses: up to three times the usual is no spike."""
        return cls(jump=2.0)

    def judge(self, value: float) -> Judgement:
        """Return what the values before say of ``value``; nothing is remembered of it."""
        if len(self._sorted) < self.warm_up:
            usual, low, high = None, -math.inf, self._wild()
        else:
            usual = self._quantile(0.5)
            low, high = self._range(usual)
        if not math.isfinite(value):
            kind: Any = "nan" if math.isnan(value) else "inf"
        elif value > high:
            kind = "spike"
        elif usual is None:
            kind = "undecided"
        else:
            kind = "drop" if value < low else "fine"
        return Judgement(kind, value, usual, low, high)

    def observe(self, value: float) -> Judgement:
        """Return what the values before say of ``value``, and remember it unless it is bad."""
        judgement = self.judge(value)
        if judgement.is_bad:
            self.num_flagged_in_a_row += 1
        else:
            self.take(value)
        return judgement

    def take(self, value: float) -> None:
        """Remember ``value``, which is finite, whatever would be said of it."""
        assert math.isfinite(value)
        self.num_flagged_in_a_row = 0
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self.window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        if len(self._sorted) >= self.warm_up:
            self._highest_usual = max(self._highest_usual, abs(self._quantile(0.5)))

    def forget(self) -> None:
        """Begin anew, with a warm-up: what is usual has changed for a reason."""
        self._values.clear()
        self._sorted.clear()
        self._highest_usual = 0.0
        self.num_flagged_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what was remembered; plain numbers."""
        return {
            "values": list(self._values),
            "highest_usual": self._highest_usual,
            "num_flagged_in_a_row": self.num_flagged_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; of a longer window the newest values are kept."""
        self._values = deque([float(value) for value in state["values"]][-self.window :])
        self._sorted = sorted(self._values)
        self._highest_usual = float(state["highest_usual"])
        self.num_flagged_in_a_row = int(state["num_flagged_in_a_row"])

    def _wild(self) -> float:
        largest = max(map(abs, self._sorted), default=0.0)
        return _WILD * largest if largest > 0 else math.inf

    def _range(self, usual: float) -> tuple[float, float]:
        least = self.jump * max(abs(usual), _FLOOR * self._highest_usual)
        up = max(self._quantile(0.84) - usual, (self._quantile(0.977) - usual) / 2)
        down = max(usual - self._quantile(0.16), (usual - self._quantile(0.023)) / 2)
        above = max(least, self.scatters * up, 2 * (self._sorted[-1] - usual))
        below = max(least, self.scatters * down, 2 * (usual - self._sorted[0]))
        return usual - below, usual + above

    def _quantile(self, part: float) -> float:
        return self._sorted[round(part * (len(self._sorted) - 1))]
