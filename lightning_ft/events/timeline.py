"""When each process committed its steps and changed its membership, and what each death and each join cost."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_ft.events.contents import Event, Process, process_of


@dataclass(frozen=True)
class Death:
    """The end of a process that was no normal end.

    Args:
        slot: Its slot.
        incarnation: How often the slot was started before.
        how: "SIGKILL", "exit code 1", "ValueError: ...".
        time: When its supervisor noticed it, at the latest when it told the others, or, for a fault of a plan, when that
            fired.
        member: Whether it took part in the training; else it was starting, or the call was over.
        step: The last step committed before.
        recovery: Seconds until the first survivor that knew of it committed a step; None if none did.
        stall: Seconds by which the survivors' longest step around the reconfiguration exceeded the median; None if the
            reconfiguration was in no step. A validation or a checkpoint between the two steps counts in.
        reconfiguration: Seconds that the slowest survivor spent in the change of membership; None if there was none.
        respawn: Seconds until the slot's next incarnation committed a step; None if it did not.
        went_on: Whether any other process of the same job committed a later step.

    """

    slot: int
    incarnation: int
    how: str
    time: float
    member: bool
    step: int
    recovery: float | None
    stall: float | None
    reconfiguration: float | None
    respawn: float | None
    went_on: bool = True


@dataclass(frozen=True)
class Join:
    """A process that entered the running training.

    Args:
        slot: Its slot.
        incarnation: How often the slot was started before.
        time: When it took part.
        step: Steps that were committed then.
        gap: Seconds by which the others' longest step around the admission exceeded the median; None if it was in no
            step.

    """

    slot: int
    incarnation: int
    time: float
    step: int
    gap: float | None


class Timeline:
    """Fed with the events of a run, in the order of time."""

    def __init__(self) -> None:
        self._times: dict[Process, array[float]] = {}
        self._steps: dict[Process, array[int]] = {}
        self._changes: list[Event] = []
        self._told: dict[Process, float] = {}
        self._fired: dict[Process, float] = {}
        self._begun_anew: list[float] = []
        self.median: float | None = None
        """Median seconds between two steps of a process, once :meth:`settle` was called."""

    def tell_step(self, event: Event) -> None:
        """Take in a step."""
        process = process_of(event)
        times = self._times.get(process)
        if times is None:
            times, self._steps[process] = self._times.setdefault(process, array("d")), array("q")
        times.append(event["t"])
        self._steps[process].append(event["step"])

    def tell_change(self, event: Event) -> None:
        """Take in a generation that a rank adopted."""
        self._changes.append(event)

    def tell_published(self, event: Event) -> None:
        """Take in a generation that the supervisor told the ranks of."""
        attempt = process_of(event)[0]
        for death in event["dead"]:
            self._told.setdefault((attempt, death["slot"], death["incarnation"]), event["t"])

    def tell_fault(self, event: Event) -> None:
        """Take in a fault of a plan."""
        self._fired[process_of(event)] = event["t"]

    def tell_begun_anew(self, event: Event) -> None:
        """Take in that no rank was left, and all began again."""
        self._begun_anew.append(event["t"])

    def settle(self) -> None:
        """Compute what concerns all steps."""
        gaps = [np.diff(np.frombuffer(times)) for times in self._times.values() if len(times) > 1]
        self.median = float(np.median(np.concatenate(gaps))) if gaps else None

    def times_of(self, process: Process) -> tuple[Sequence[float], Sequence[int]]:
        """Return when a process committed which steps."""
        return self._times.get(process, array("d")), self._steps.get(process, array("q"))

    def processes(self) -> list[Process]:
        """Return those that committed steps."""
        return list(self._times)

    def death(self, exit: Event) -> Death:
        """Describe the death that an exit is."""
        process = process_of(exit)
        attempt, slot, incarnation = process
        fired = self._fired.get(process)
        # The others go on as soon as a rank says what it raised, or was excluded; when it has ended may be told long after.
        noticed = min(float(exit["t"]) - exit.get("ago", 0.0), self._told.get(process, float("inf")))
        time = noticed if fired is None else fired
        later = [t[0] for (a, s, i), t in self._times.items() if (a, s) == (attempt, slot) and i > incarnation and t]
        until = min(later, default=float("inf"))  # later, the slot may die again
        told = [e for e in self._changes if time <= e["t"] <= until and e["slot"] != slot and _tells_of(slot, e)]
        # Where each of the others learned of it; of two deaths at once, some may learn in one change and some in two.
        changes = list({process_of(event): event for event in reversed(told)}.values())
        next_steps = [found for change in changes if (found := self._next_step(change)) is not None]
        next_steps = next_steps or self._first_steps_of_those_who_began_again(attempt, time)
        own_times, own_steps = self.times_of(process)
        last = own_steps[-1] if own_times and own_times[-1] > time else self._step_at(time)  # it may end a step first
        others = (p for p, times in self._times.items() if p[0] == attempt and p != process and times[-1] > time)
        return Death(
            slot=slot,
            incarnation=incarnation,
            how=exit["how"],
            time=time,
            member=exit["member"],
            step=last,
            recovery=min(next_steps) - time if next_steps else None,
            stall=self._excess(changes),
            reconfiguration=max((event["stall_ms"] / 1e3 for event in changes), default=None),
            respawn=min(later) - time if later else None,
            went_on=any(self._steps[other][-1] > last for other in others),
        )

    def join(self, joined: Event) -> Join:
        """Describe the join that a joiner reports."""
        slot = joined["slot"]
        changes = [e for e in self._changes if slot in e["joined"] and e["t"] <= joined["t"]]
        changes = [e for e in changes if e["generation"] == changes[-1]["generation"] and e["slot"] != slot]
        return Join(slot, joined["incarnation"], joined["t"], joined["step"], self._excess(changes))

    def _step_at(self, time: float) -> int:
        positions = ((process, bisect_right(times, time)) for process, times in self._times.items())
        return max((self._steps[process][position - 1] for process, position in positions if position), default=0)

    def _first_steps_of_those_who_began_again(self, attempt: int, time: float) -> list[float]:
        """If nobody was left who could be told of a death at ``time``: those who began again had heard of it."""
        since = next((moment for moment in self._begun_anew if moment >= time), None)
        if since is None:
            return []
        later = ((times, bisect_left(times, since)) for (a, _, _), times in self._times.items() if a == attempt)
        return [times[position] for times, position in later if position < len(times)]

    def _next_step(self, change: Event) -> float | None:
        times, _ = self.times_of(process_of(change))
        position = bisect_left(times, change["t"])
        return times[position] if position < len(times) else None

    def _excess(self, changes: Sequence[Event]) -> float | None:
        """Seconds by which the longest of the steps in which these changes happened exceeded the median."""
        gaps: list[float] = []
        for event in changes:
            times, _ = self.times_of(process_of(event))
            position = bisect_left(times, event["t"])
            if 0 < position < len(times):
                gaps.append(times[position] - times[position - 1])
        return max(0.0, max(gaps) - self.median) if gaps and self.median is not None else None


def _tells_of(slot: int, change: Event) -> bool:
    return any(death[0] == slot for death in change["dead"])
