"""All that is known of a training's health, from what is told at its steps; without a Trainer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ft.health.goodput import Goodput
from lightning_ft.health.outages import Outages
from lightning_ft.health.restarts import RestartWatch, Verdict
from lightning_ft.health.step_values import OwnSteps, Reason, StepValues, merge
from lightning_ft.health.stragglers import Straggler, StragglerWatch

_MOST_VERDICTS = 1000


@dataclass(frozen=True)
class Membership:
    """Who takes part.

    Args:
        changes: A number that grows at the same batch on all ranks when others take part than before.
        slots: Those of the live ranks.
        num_slots: How many there are.
        live: Replicas that are whole.
        replicas: How many there are if nothing is missing.

    """

    changes: int = 0
    slots: tuple[int, ...] = (0,)
    num_slots: int = 1
    live: int = 1
    replicas: int = 1


@dataclass(frozen=True)
class Conclusions:
    """What the ranks learned from an exchange, the same on all of them.

    Args:
        steps: The steps since the last one.
        verdicts: Of restarts.
        stragglers: Who turned out to be one.
        unusual: Steps whose values are not like those before, without a restart; of several in a row the first one.

    """

    steps: list[StepValues]
    verdicts: list[Verdict]
    stragglers: list[Straggler]
    unusual: list[StepValues]


class HealthMonitor:
    """Takes in steps, and concludes from the rows of all ranks.

    Args:
        window: How many steps after a restart are looked at.
        capacity: How many steps lie between two exchanges at most.
        clock: Returns the time of the wall.

    """

    def __init__(self, window: int, capacity: int, clock: Callable[[], float] = time.time) -> None:
        self.goodput = Goodput(clock)
        self.restarts = RestartWatch(window)
        self.stragglers = StragglerWatch()
        self.outages = Outages()
        self.verdicts: list[Verdict] = []
        self.step = 0
        """How many steps are done."""
        self._own = OwnSteps(capacity)
        self._reasons = Reason(0)
        self._members = Membership()
        self._num_ranks = 0
        self._num_restarts = self._num_bad = 0
        self._was_unusual = False
        self._newest: dict[str, float] = {}

    # Steps.

    def start(self, step: int, members: Membership, *, joins: bool = False) -> None:
        """The training begins with ``step`` done; if it ``joins``, it is under way on other ranks."""
        self.step, self._members = step, members
        self._own.clear()
        self._reasons = Reason.RESUME if step and not joins else Reason(0)
        self.outages.start(step, members.slots, members.num_slots)
        self.goodput.start(step, joins=joins)

    def go_back(self, step: int) -> None:
        """All ranks are back at ``step``."""
        self.step = step
        self._own.clear()
        self._reasons |= Reason.ROLLBACK

    def take_back(self, step: int) -> None:
        """The weights are those of ``step`` again, and the training goes on from here; what it did since is lost."""
        self.goodput.lose("recomputation", (self.step - step) * (self.goodput.usual_step or 0.0))
        self.restarts.take_back(step)
        self._own.clear()
        self._reasons |= Reason.ROLLBACK

    def end_step(
        self,
        step: int,
        *,
        seconds: float,
        own_seconds: float,
        losses: Sequence[Any],
        norm: Any,
        members: Membership,
    ) -> None:
        """A step is done.

        Args:
            step: How many are done now.
            seconds: How long it took.
            own_seconds: How much of that was this rank's own part.
            losses: Of its batches that count on this rank; may be tensors.
            norm: Of its gradient; may be a tensor, or None.
            members: Who took part.

        """
        change = None
        if members.changes != self._members.changes:
            change = self.outages.change(step, members.slots)
            self._reasons |= Reason.DEATH if change == "recovery" else Reason.REJOIN
        else:
            self._own.seconds.append(own_seconds)
        self.goodput.end_step(step, seconds, live=members.live, replicas=members.replicas, change=change)
        self._own.add(step, losses, norm, self._reasons)
        self.step, self._members, self._reasons = step, members, Reason(0)

    # Conclusions.

    def row(self, slot: int) -> list[float]:
        """Return what this rank has to tell the others."""
        row = self._own.row(slot, self.step)
        self._own.clear()
        return row

    def conclude(self, rows: Sequence[Sequence[float]], *, is_last: bool = False) -> Conclusions:
        """Return what the rows of all ranks tell; restarts are judged by what there is if the training ends here."""
        told = merge(rows, self.step)
        verdicts: list[Verdict | None] = []
        unusual = []
        for found in told.steps:
            count, diverged = self.restarts.num_unusual, self.restarts.is_diverged
            if found.reasons:
                counts = (self._num_ranks or len(rows), len(rows))
                verdicts.append(self.restarts.restart(found.step - 1, found.reasons.text, replicas=counts))
            verdicts.append(self.restarts.observe(found.step, found.known))
            is_unusual = self.restarts.num_unusual > count and not diverged
            if is_unusual and not self._was_unusual:
                unusual.append(found)
            self._was_unusual = is_unusual
            self._newest |= found.known
        if is_last:
            verdicts.append(self.restarts.close())
        self._num_ranks = len(rows)
        known = [verdict for verdict in verdicts if verdict is not None]
        self.verdicts = [*self.verdicts, *known][-_MOST_VERDICTS:]
        self._num_restarts += len(known)
        self._num_bad += sum(verdict.is_bad for verdict in known)
        return Conclusions(told.steps, known, self.stragglers.observe(self.step, told.seconds), unusual)

    def report(self) -> dict[str, float]:
        """Return the state of health in numbers."""
        seconds = self.goodput.seconds
        values = {"goodput": self.goodput.fraction}
        values |= {f"lost_{kind}": lost / seconds if seconds else 0.0 for kind, lost in self.goodput.lost.items()}
        values |= {
            "replicas": float(self._members.live),
            "ranks_away": float(len(self.outages.away)),
            "restarts": float(self._num_restarts),
            "discontinuities": float(self._num_bad),
            "unusual_steps": float(self.restarts.num_unusual),
        }
        if self.stragglers.over_peers:
            values["slowest_over_peers"] = max(self.stragglers.over_peers.values())
        if self.goodput.usual_step is not None:
            values["step_seconds"] = self.goodput.usual_step
        return values | self._newest

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all of it; plain data."""
        return {
            "goodput": self.goodput.state_dict(self.step),
            "restarts": self.restarts.state_dict(),
            "stragglers": self.stragglers.state_dict(),
            "num_ranks": self._num_ranks,
            "was_unusual": self._was_unusual,
            "counts": [self._num_restarts, self._num_bad],
            "verdicts": [list(vars(verdict).values()) for verdict in self.verdicts],
        }

    def load_state_dict(self, state: dict[str, Any], *, is_running: bool = False) -> None:
        """Go on from it.

        Args:
            state: What :meth:`state_dict` returned.
            is_running: The training goes back to that moment. What became of its time, and verdicts, stay.

        """
        self.restarts.load_state_dict(state["restarts"])
        self.stragglers.load_state_dict(state["stragglers"])
        self._num_ranks, self._was_unusual = state["num_ranks"], state["was_unusual"]
        if is_running:
            return
        self.goodput.load_state_dict(state["goodput"])
        self._num_restarts, self._num_bad = state["counts"]
        self.verdicts = [Verdict(*fields) for fields in state["verdicts"]]
