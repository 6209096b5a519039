"""Whether the training went on after a restart as it would have without: a verdict over the steps that follow it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ft.elastic.checks import check_count
from lightning_ft.health.series import Finding, Outcome, Series
from lightning_ft.rerun.baseline import Baseline

_WORST_FIRST: tuple[Outcome, ...] = ("nan", "spike", "drop", "undecided", "continuous")


@dataclass(frozen=True)
class Verdict:
    """What became of the training after a restart.

    Args:
        step: The last step before it.
        reason: What it was: ``"death"``, ``"rejoin"``, ``"resume"``, ``"rollback"``, several of them joined by ``+``.
        outcome: ``"continuous"``: the steps after it are like those before. ``"spike"``, ``"drop"``, ``"nan"``: they are
            not. ``"undecided"``: too few steps before it, or none after it.
        series: Where that shows, ``"loss"`` or ``"grad_norm"``; empty if nowhere.
        usual: The median before it; None if undecided.
        value: What is at odds with that, or the median after it; None if there is none.
        num_steps: How many steps after it were looked at.

    """

    step: int
    reason: str
    outcome: Outcome
    series: str
    usual: float | None
    value: float | None
    num_steps: int

    @property
    def is_bad(self) -> bool:
        """Whether the training did not go on as before."""
        return self.outcome in ("spike", "drop", "nan")

    def __str__(self) -> str:
        text = f"after the {self.reason} at step {self.step}: {self.outcome}"
        if not self.is_bad or self.value is None:
            return text
        usual = "" if self.usual is None else f", usually {self.usual:.4g}"
        return f"{text} ({self.series} {self.value:.4g}{usual})"


@dataclass
class _Window:
    """The steps after a restart, until it is judged."""

    step: int
    reasons: list[str]
    tolerance: float = 1.0
    values: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        return [known[name] for _, known in self.values if name in known]

    def to_list(self) -> list[Any]:
        return [self.step, list(self.reasons), self.tolerance, [[step, dict(known)] for step, known in self.values]]

    @classmethod
    def from_list(cls, parts: Sequence[Any]) -> "_Window":
        step, reasons, tolerance, values = parts
        return cls(step, list(reasons), tolerance, [(at, dict(known)) for at, known in values])


class RestartWatch:
    """Judges restarts, causally: by the values before a restart and those of some steps after it.

    The values of these steps are remembered as usual only when they turned out to be. After a spike or NaN nothing is, until
    the values of as many steps in a row are like those before again: a divergence does not become the usual by going on.

    Args:
        window: How many steps after a restart are looked at; fewer if the next restart comes sooner.
        series: Names of the values that each step has: a loss, and norms. Only a loss that drops is told.

    Raises:
        ValueError: If ``window`` is less than 2.

    Example::

        watch = RestartWatch()
        watch.restart(step=100, reason="rejoin")
        for step, loss in enumerate(losses, 101):
            verdict = watch.observe(step, {"loss": loss})

    """

    def __init__(self, window: int = 20, series: Sequence[str] = ("loss", "grad_norm")) -> None:
        check_count("RestartWatch", "window", window, least=2)
        self.window = window
        self.num_unusual = 0
        """Steps outside of such windows with a value that is no usual one."""
        self._series = {
            name: Series(Baseline.of_norms() if index else Baseline(), drops=index == 0, window=window)
            for index, name in enumerate(series)
        }
        self._open: _Window | None = None
        self._held: deque[dict[str, float]] | None = None  # the last values of a divergence; None: there is none
        self._last_step = -1

    @property
    def is_diverged(self) -> bool:
        """Whether the last values are still those of a spike or NaN after a restart."""
        return self._held is not None

    def restart(self, step: int, reason: str, *, replicas: tuple[int, int] = (1, 1)) -> Verdict | None:
        """Open a window.

        Args:
            step: How many steps are done; fewer than before if it went back.
            reason: What happened.
            replicas: How many average their gradients before it and after it: the norm of a mean of fewer is larger.

        Returns:
            The verdict of the restart before, if its window was still open.

        """
        verdict = None
        if self._open is not None and not self._open.values and step == self._open.step:
            window = self._open
            window.reasons += [reason] if reason not in window.reasons else []
        else:
            verdict = self.close()
            window = self._open = _Window(step, [reason])
        before, after = replicas
        window.tolerance *= math.sqrt(max(1.0, before / max(1, after)))
        if step < self._last_step:
            self._go_back(step)
        self._last_step = step
        return verdict

    def observe(self, step: int, values: Mapping[str, float]) -> Verdict | None:
        """Take in the values of a step; return the verdict of a restart if this was the last one that it waited for.

        Args:
            step: How many steps are done with it. Fewer than before: a rollback that nobody told of.
            values: Of the series; those that are missing are not judged.

        """
        verdict = None
        if step <= self._last_step:
            verdict = self.restart(step - 1, "rollback")
        self._last_step = step
        known = {name: float(value) for name, value in values.items() if name in self._series}
        if self._open is not None:
            self._open.values.append((step, known))
            if len(self._open.values) >= self.window or self._is_certain(self._open):
                verdict = self.close() or verdict
        elif self._held is not None:
            self._hold(step, known)
        else:
            self.num_unusual += self._enter(step, known)
        return verdict

    def close(self) -> Verdict | None:
        """Judge the restart whose window is open by what is there; to be called when the training ends, too."""
        window, self._open = self._open, None
        if window is None:
            return None
        verdict = self._judge(window)
        if verdict.outcome in ("spike", "nan"):
            self._held = deque((values for _, values in window.values), maxlen=self.window)
            return verdict
        if verdict.outcome != "undecided":
            self._held = None
        elif window.values:  # nothing tells whether they go together with what was before
            for series in self._series.values():
                series.forget()
        for step, values in window.values:
            self._enter(step, values)
        return verdict

    def take_back(self, step: int) -> None:
        """Let what is usual be what it was at ``step``, whose weights the next steps go on from; they count on."""
        self._open = self._held = None
        self._go_back(step)

    def _is_certain(self, window: _Window) -> bool:
        """Whether no further step could make up for what was seen."""
        return any(
            name in window.values[-1][1] and series.is_ruled_out(window.of(name), self._tolerance(name, window))
            for name, series in self._series.items()
        )

    def _judge(self, window: _Window) -> Verdict:
        found = {
            name: series.compare(values, self._tolerance(name, window))
            for name, series in self._series.items()
            if (values := window.of(name))
        }
        name, finding = min(found.items(), key=_badness, default=("", Finding("undecided", None, math.nan)))
        is_at_odds = finding.outcome in ("nan", "spike", "drop")
        return Verdict(
            window.step,
            "+".join(window.reasons),
            finding.outcome,
            name if is_at_odds else "",
            finding.usual,
            finding.value if found else None,
            len(window.values),
        )

    def _tolerance(self, name: str, window: _Window) -> float:
        return 1.0 if name == next(iter(self._series)) else window.tolerance

    def _enter(self, step: int, values: Mapping[str, float]) -> bool:
        """Remember what is usual; return whether something was not."""
        return not all([self._series[name].enter(step, value) for name, value in values.items()])

    def _hold(self, step: int, values: dict[str, float]) -> None:
        """Remember nothing of a divergence until it is over."""
        assert self._held is not None
        self.num_unusual += 1
        self._held.append(values)
        probe = _Window(step, [], values=[(step, held) for held in self._held])
        if len(self._held) == self.window and not self._judge(probe).is_bad:
            self._held = None

    def _go_back(self, step: int) -> None:
        for series in self._series.values():
            series.go_back(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen; plain data."""
        window = self._open
        return {
            "series": {name: series.state_dict() for name, series in self._series.items()},
            "window": None if window is None else window.to_list(),
            "held": None if self._held is None else list(self._held),
            "last_step": self._last_step,
            "num_unusual": self.num_unusual,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen; a window that was open goes on, too."""
        for name, series in self._series.items():
            series.load_state_dict(state["series"][name])
        self._open = None if state["window"] is None else _Window.from_list(state["window"])
        self._held = None if state["held"] is None else deque(state["held"], maxlen=self.window)
        self._last_step = int(state["last_step"])
        self.num_unusual = int(state["num_unusual"])


def _badness(named: tuple[str, Finding]) -> int:
    return _WORST_FIRST.index(named[1].outcome)
