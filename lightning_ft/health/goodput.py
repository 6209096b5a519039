"""Goodput: the part of the wall time in which the training got on, and what became of the rest."""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

Loss = Literal["startup", "restart", "recovery", "joining", "missing", "recomputation", "checkpoint"]

LOSSES: tuple[Loss, ...] = ("startup", "restart", "recovery", "joining", "missing", "recomputation", "checkpoint")
"""What time is lost to. ``missing``: the share of replicas that are away, of the time that the others worked."""

_REMEMBERED = 32


class Goodput:
    """Keeps account of the time of a training, over resumptions.

    What is not lost is useful: steps, evaluation, the epoch's ends, whatever the training would also do without faults
    and checkpoints. What a change of membership costs is what its step took beyond a usual one.

    Args:
        clock: Returns the time; of the wall, since the account goes on in a later process.

    Example::

        goodput = Goodput()
        goodput.begin()
        goodput.end_step(1, seconds=0.25)
        goodput.fraction

    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since: float | None = None
        self._before = 0.0  # seconds in earlier processes and fits
        self._lost: dict[Loss, float] = dict.fromkeys(LOSSES, 0.0)
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._highest = 0
        self._left: tuple[float, int] | None = None  # when the state was saved that this goes on from, and its step

    def begin(self) -> None:
        """The fit begins."""
        if self._since is None:
            self._since = self._clock()

    def start(self, step: int, *, joins: bool = False) -> None:
        """The training begins with ``step`` done: the time since :meth:`begin` was set-up; before it, nothing ran.

        Args:
            step: How many steps are done.
            joins: It is under way, and the account is that of a rank which was in it all the time.

        """
        self.begin()
        assert self._since is not None
        if joins:
            self._since, self._left = self._clock(), None
        elif self._left is not None:
            saved, left_at = self._left
            if left_at == step:  # else it goes on from something else
                self._before += max(0.0, self._since - saved)
                self.lose("restart", self._since - saved)
            self._left = None
        self.lose("startup", self._clock() - self._since)
        self._highest = step

    def pause(self) -> None:
        """The fit is over; the time until the next one is not counted."""
        if self._since is not None:
            self._before += max(0.0, self._clock() - self._since)
            self._since = None

    def lose(self, kind: Loss, seconds: float) -> None:
        """Count time as lost."""
        self._lost[kind] += max(0.0, seconds)

    def end_step(
        self,
        step: int,
        seconds: float,
        *,
        live: int = 1,
        replicas: int = 1,
        change: Literal["recovery", "joining"] | None = None,
    ) -> None:
        """Count the time of a step.

        Args:
            step: How many steps are done now; not more than before means that this one was done again.
            seconds: How long it took, without evaluation and checkpoints.
            live: Replicas that took part.
            replicas: Replicas that there are if nothing is missing.
            change: What changed the membership meanwhile, if anything did.

        """
        usual = median(self._usual) if self._usual else None
        if change is not None and usual is not None:
            self.lose(change, seconds - usual)
            seconds = min(seconds, usual)
        if step <= self._highest:
            self.lose("recomputation", seconds)
            return
        self._highest = step
        if live < replicas:
            self.lose("missing", seconds * (1.0 - live / replicas))
        if change is None:
            self._usual.append(seconds)

    @property
    def seconds(self) -> float:
        """Wall time until now."""
        return self._before + (0.0 if self._since is None else max(0.0, self._clock() - self._since))

    @property
    def lost(self) -> dict[Loss, float]:
        """Seconds lost, by what to."""
        return dict(self._lost)

    @property
    def fraction(self) -> float:
        """Useful time over wall time."""
        total = self.seconds
        return max(0.0, 1.0 - math.fsum(self._lost.values()) / total) if total > 0.0 else 1.0

    @property
    def usual_step(self) -> float | None:
        """Median seconds of the last steps without a change of membership."""
        return median(self._usual) if self._usual else None

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the account at ``step``."""
        return {
            "seconds": self.seconds,
            "lost": dict(self._lost),
            "usual": list(self._usual),
            "saved_at": self._clock(),
            "step": step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an account; what was done after it was saved, and the time until now, counts as ``restart``."""
        self._before = float(state["seconds"])
        self._lost = {kind: float(state["lost"].get(kind, 0.0)) for kind in LOSSES}
        self._usual = deque(state["usual"], maxlen=_REMEMBERED)
        self._left = (float(state["saved_at"]), int(state["step"]))
