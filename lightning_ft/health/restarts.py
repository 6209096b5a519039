"""Whether the training went on after a restart as it would have without: a verdict over the steps that follow it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from lightning_ft.elastic.checks import check_count
from lightning_ft.rerun.baseline import Baseline

Outcome = Literal["continuous", "spike", "drop", "nan", "undecided"]
_Finding = tuple[Outcome, str, float | None, float | None]  # outcome, series, usual, value

_MEMORY = 512  # steps that a rollback may go back and still be judged by what was before
_FAR = 2.0  # times the upper end of the usual range
_HEAD = 5  # first steps, which are looked at by themselves, too
_FEW = 3  # values that are too few to have a median


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
        self._baselines = {name: Baseline.of_norms() if index else Baseline() for index, name in enumerate(series)}
        self._entered: dict[str, deque[tuple[int, float]]] = {name: deque(maxlen=_MEMORY) for name in series}
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
        known = {name: float(value) for name, value in values.items() if name in self._baselines}
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
            for name, baseline in self._baselines.items():
                baseline.forget()
                self._entered[name].clear()
        for step, values in window.values:
            self._enter(step, values)
        return verdict

    def take_back(self, step: int) -> None:
        """Let what is usual be what it was at ``step``, whose weights the next steps go on from; they count on."""
        self._open = self._held = None
        self._go_back(step)

    def _judge(self, window: _Window) -> Verdict:
        reason, count = "+".join(window.reasons), len(window.values)
        found: list[_Finding] = []
        for position, name in enumerate(self._baselines):
            values = [values[name] for _, values in window.values if name in values]
            if values:
                tolerance = window.tolerance if position else 1.0
                found.append(self._compare(name, values, tolerance, drops=position == 0))
        for outcome in ("nan", "spike", "drop", "undecided", "continuous"):  # the worst of them
            for kind, name, usual, value in found:
                if kind == outcome:
                    series = "" if kind in ("undecided", "continuous") else name
                    return Verdict(window.step, reason, kind, series, usual, value, count)
        return Verdict(window.step, reason, "undecided", "", None, None, count)

    def _is_certain(self, window: _Window) -> bool:
        """Whether no further step could make up for what was seen."""
        (_, newest) = window.values[-1]
        for position, name in enumerate(self._baselines):
            if name in newest and self._baselines[name].judge(newest[name]).is_bad:
                values = [values[name] for _, values in window.values if name in values]
                if self._find_bad(name, values, window.tolerance if position else 1.0) is not None:
                    return True
        return False

    def _find_bad(self, name: str, values: list[float], tolerance: float) -> _Finding | None:
        """Return what single values say."""
        baseline = self._baselines[name]
        for value in values:
            if not math.isfinite(value):
                return "nan", name, baseline.judge(0.0).usual, value
        judged = [(value, found) for value in values if (found := baseline.judge(value / tolerance)).kind == "spike"]
        if not judged:
            return None
        # One value above the range happens by itself once in ten thousand steps; that of the restart stands further out,
        # or not alone. During the warm-up only one is above it that is absurd.
        worst, found = max(judged, key=lambda pair: pair[0])
        usual = found.usual
        if len(judged) > 1 or usual is None or worst / tolerance > usual + _FAR * (found.high - usual):
            return "spike", name, usual, worst
        return None

    def _compare(self, name: str, values: list[float], tolerance: float, *, drops: bool) -> _Finding:
        baseline = self._baselines[name]
        bad = self._find_bad(name, values, tolerance)
        if bad is not None:
            return bad
        middle = median(values)
        usual = baseline.judge(middle).usual
        if usual is None:
            return "undecided", name, None, middle
        recent = [value for _, value in self._entered[name]][-2 * self.window :]
        for part in (values, values[:_HEAD], values[1 : 1 + _HEAD]):  # it may recover soon, or begin one step later
            if _moved(recent, [value / tolerance for value in part], 1.0 + baseline.jump):
                return "spike", name, usual, median(part)
        if drops and _moved(recent, values, 1.0 - baseline.jump):
            return "drop", name, usual, middle
        return "continuous", name, usual, middle

    def _enter(self, step: int, values: Mapping[str, float]) -> bool:
        """Remember what is usual; return whether something was not."""
        unusual = False
        for name, value in values.items():
            if self._baselines[name].observe(value).is_bad:
                unusual = True
            else:
                self._entered[name].append((step, value))
        return unusual

    def _hold(self, step: int, values: dict[str, float]) -> None:
        """Remember nothing of a divergence until it is over."""
        assert self._held is not None
        self.num_unusual += 1
        self._held.append(values)
        probe = _Window(step, [], values=[(step, held) for held in self._held])
        if len(self._held) == self.window and not self._judge(probe).is_bad:
            self._held = None

    def _go_back(self, step: int) -> None:
        """Let what is usual be what it was at ``step``."""
        for name, entered in self._entered.items():
            while entered and entered[-1][0] > step:
                entered.pop()
            baseline = self._baselines[name]
            state = baseline.state_dict()
            baseline.load_state_dict({**state, "values": [value for _, value in entered]})

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen; plain data."""
        window = self._open
        return {
            "baselines": {name: baseline.state_dict() for name, baseline in self._baselines.items()},
            "entered": {name: [list(pair) for pair in entered] for name, entered in self._entered.items()},
            "window": None if window is None else [window.step, window.reasons, window.tolerance, _listed(window.values)],
            "held": None if self._held is None else list(self._held),
            "last_step": self._last_step,
            "num_unusual": self.num_unusual,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen; a window that was open goes on, too."""
        for name, baseline in self._baselines.items():
            baseline.load_state_dict(state["baselines"][name])
            pairs = [(int(step), float(value)) for step, value in state["entered"][name]]
            self._entered[name] = deque(pairs, maxlen=_MEMORY)
        self._open = None
        if state["window"] is not None:
            step, reasons, tolerance, values = state["window"]
            self._open = _Window(step, list(reasons), tolerance, [(at, dict(found)) for at, found in values])
        self._held = None if state["held"] is None else deque(state["held"], maxlen=self.window)
        self._last_step = int(state["last_step"])
        self.num_unusual = int(state["num_unusual"])


def _moved(before: list[float], after: list[float], factor: float) -> bool:
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
        low = fall * _part(newer, 0.1)
        return median(after) < factor * fall * usual and _part(after, 0.9) < low
    return median(after) > factor * usual and _part(after, 0.1) > _part(newer, 0.9)


def _part(values: list[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]


def _listed(values: list[tuple[int, dict[str, float]]]) -> list[list[Any]]:
    return [[step, dict(found)] for step, found in values]
