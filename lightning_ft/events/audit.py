"""Replays a run's events: which batches were trained, which steps were committed, what each death and each join cost.

Pure over the events that :func:`~lightning_ft.events.log.read_events` returns; nothing is read or measured here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

Event = Mapping[str, Any]
Process = tuple[int, int]  # slot, incarnation
Place = tuple[str, int, int]  # ("step", its number, 0) or ("accumulated", epoch, batch)
_CONTENT = ("epoch", "tickets", "members")


@dataclass(frozen=True)
class EpochAudit:
    """The batches of one epoch.

    Args:
        num_tickets: Batches that the epoch has; None if that is not known.
        announced: Whether a rank said how many there are, or that streams do not tell.
        num_trained: Batches in committed steps, repetitions included.
        twice: Tickets in more than one committed step.
        never: Tickets in no committed step, though the epoch has them. Those of the last epoch may only mean that
            training stopped in the middle of it.
        unknown: Tickets trained that the epoch does not have.

    """

    num_tickets: int | None
    announced: bool
    num_trained: int
    twice: tuple[int, ...]
    never: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True)
class Death:
    """The end of a process that was no normal end.

    Args:
        slot: Its slot.
        incarnation: How often the slot was started before.
        how: "SIGKILL", "exit code 1", "ValueError: ...".
        time: When its supervisor noticed it or, for a fault of a plan, when that fired.
        member: Whether it took part in the training; else it was starting, or the call was over.
        step: The last step committed before.
        recovery: Seconds until the first survivor that knew of it committed a step; None if none did.
        stall: Seconds by which the survivors' longest step around the reconfiguration exceeded the median; None if the
            reconfiguration was in no step. A validation or a checkpoint between the two steps counts in.
        reconfiguration: Seconds that the slowest survivor spent in the change of membership; None if there was none.
        respawn: Seconds until the slot's next incarnation committed a step; None if it did not.

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


@dataclass(frozen=True)
class GenerationAudit:
    """A version of the membership, as its supervisor published it.

    Args:
        number: Its number.
        reason: Why it was published.
        members: Live slots, by rank.
        dead: Slots gone since the one before.
        time: When it was published.

    """

    number: int
    reason: str
    members: tuple[int, ...]
    dead: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class Audit:
    """What the events of a run add up to.

    Args:
        epochs: By number.
        deaths: By time.
        joins: By time.
        generations: By number.
        steps: The committed steps, sorted.
        steps_lost: Steps missing between the first and the last committed one.
        conflicts: Steps that two ranks which went on from them describe differently.
        partial: Steps that lack batches which they would have had without faults, where the global batch is constant.
        median_step: Median seconds between two steps of a process; None if no process made two.
        exit_code: The job's, None while it runs.

    """

    epochs: dict[int, EpochAudit]
    deaths: tuple[Death, ...]
    joins: tuple[Join, ...]
    generations: tuple[GenerationAudit, ...]
    steps: tuple[int, ...]
    steps_lost: tuple[int, ...]
    conflicts: tuple[int, ...]
    partial: tuple[int, ...]
    median_step: float | None
    exit_code: int | None

    def problems(self, *, unfinished_epoch: bool = False) -> list[str]:
        """Return what is wrong with the run's data and steps, a sentence each; empty if nothing is.

        Args:
            unfinished_epoch: Whether training was meant to stop in the middle of the last epoch.

        """
        found: list[str] = []
        for number, epoch in sorted(self.epochs.items()):
            is_cut = unfinished_epoch and number == max(self.epochs)
            lists = (
                ("twice", epoch.twice),
                ("never", () if is_cut else epoch.never),
                ("without having it", epoch.unknown),
            )
            found += [f"Epoch {number} trained {_tell(tickets)} {how}." for how, tickets in lists if tickets]
            if not epoch.announced:
                found.append(f"Nobody said how many batches epoch {number} has.")
        if self.steps_lost:
            found.append(f"No rank committed steps {_tell(self.steps_lost)}.")
        if self.conflicts:
            found.append(f"Ranks disagree about what is in steps {_tell(self.conflicts)}.")
        if self.partial:
            found.append(f"The global batch is constant, but steps {_tell(self.partial)} lack a part of theirs.")
        return found


def audit(events: Iterable[Event]) -> Audit:
    """Replay the events of one run.

    Args:
        events: Those of all ranks and of the supervisor, sorted by time.

    Returns:
        What they add up to.

    """
    by_kind: dict[str, list[Event]] = {}
    records: list[Event] = []
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
        if event["event"] in ("step", "accumulated"):
            records.append(event)
        elif event["event"] == "rewound":
            records = [record for record in records if not _is_later(record, event)]
    timeline = _Timeline(by_kind.get("step", []), by_kind.get("generation", []), by_kind.get("fault", []))
    died = {_process(event) for event in by_kind.get("exit", []) if event["code"] != 0}
    contents, different = _contents(records, died)
    steps = sorted(number for kind, number, _ in contents if kind == "step")
    conflicts = (number for kind, number, _ in different if kind == "step")
    return Audit(
        epochs=_audit_epochs(contents.values(), by_kind.get("epoch", [])),
        deaths=tuple(timeline.death(exit) for exit in by_kind.get("exit", []) if exit["code"] != 0 or exit["member"]),
        joins=tuple(timeline.join(joined) for joined in by_kind.get("joined", [])),
        generations=tuple(_generation(event) for event in by_kind.get("generation", []) if event["slot"] is None),
        steps=tuple(steps),
        steps_lost=tuple(sorted(set(range(steps[0], steps[-1])) - set(steps))) if steps else (),
        conflicts=tuple(sorted(conflicts)),
        partial=tuple(sorted(_partial(contents, by_kind.get("epoch", [])))),
        median_step=timeline.median,
        exit_code=next((event["code"] for event in by_kind.get("finish", [])), None),
    )


def _contents(records: Sequence[Event], died: Set[Process]) -> tuple[dict[Place, Event], set[Place]]:
    """What each step contained, and the steps of which the ranks that went on say different things.

    A rank may die after it completed a reduction that the survivors had not completed yet: they run it again, among
    themselves, and that is what the training went on from. So what a rank says of its last batch before it died only
    counts if nobody else knows of it. Batches that were only accumulated are listed like steps.
    """
    told: dict[Place, list[tuple[int, Event]]] = {}
    last_batch: dict[Process, int] = {}
    for index, record in enumerate(records):
        told.setdefault(_place(record), []).append((index, record))
        if any(record.get("tickets", {}).values()):
            last_batch[_process(record)] = index
    contents: dict[Place, Event] = {}
    conflicts: set[Place] = set()
    for place, by_index in told.items():
        went_on = [r for i, r in by_index if _process(r) not in died or i < last_batch.get(_process(r), 0)]
        counting = went_on or [by_index[-1][1]]
        contents[place] = counting[0]
        if any(counting[0].get(field) != record.get(field) for record in counting for field in _CONTENT):
            conflicts.add(place)
    return contents, conflicts


def _is_later(record: Event, rewound: Event) -> bool:
    """Whether a rank that went back gave up what ``record`` tells: all did, and it does not count."""
    if record["event"] == "step":
        return bool(record["step"] > rewound["step"])
    return bool(record["batch"] > rewound["batch"])


def _place(record: Event) -> Place:
    return ("step", record["step"], 0) if record["event"] == "step" else ("accumulated", record["epoch"], record["batch"])


def _tells_of(slot: int, change: Event) -> bool:
    return any(death[0] == slot for death in change["dead"])


def _process(event: Event) -> Process:
    return event["slot"], event["incarnation"]


def _audit_epochs(steps: Iterable[Event], announcements: Iterable[Event]) -> dict[int, EpochAudit]:
    trained: dict[int, Counter[int]] = {}
    for step in steps:
        if "epoch" in step:
            trained.setdefault(step["epoch"], Counter()).update(chain.from_iterable(step["tickets"].values()))
    sizes: dict[int, int | None] = {event["epoch"]: event["num_tickets"] for event in announcements}
    return {
        number: _epoch(trained.get(number, Counter()), sizes.get(number), number in sizes)
        for number in sorted({*trained, *sizes})
    }


def _partial(contents: Mapping[Place, Event], announcements: Iterable[Event]) -> Iterator[int]:
    """The steps that have a part of a global batch only."""
    sizes = {
        event["epoch"]: (event["global_batch"], event["num_tickets"]) for event in announcements if "global_batch" in event
    }
    for (_, number, _), record in contents.items():
        if record.get("epoch") in sizes:
            size, num_tickets = sizes[record["epoch"]]
            tickets = set(chain.from_iterable(record["tickets"].values()))
            whole = {first + i for first in {ticket // size * size for ticket in tickets} for i in range(size)}
            if any(ticket not in tickets for ticket in whole if ticket < num_tickets):
                yield number


def _epoch(trained: Counter[int], num_tickets: int | None, announced: bool) -> EpochAudit:
    expected = set(range(num_tickets or 0))
    return EpochAudit(
        num_tickets=num_tickets,
        announced=announced,
        num_trained=trained.total(),
        twice=tuple(sorted(ticket for ticket, count in trained.items() if count > 1)),
        never=tuple(sorted(expected - trained.keys())),
        unknown=() if num_tickets is None else tuple(sorted(trained.keys() - expected)),
    )


def _generation(event: Event) -> GenerationAudit:
    dead = tuple(sorted(death["slot"] for death in event["dead"]))
    return GenerationAudit(event["number"], event["reason"], tuple(event["members"]), dead, event["t"])


class _Timeline:
    """When each process committed its steps and changed its membership.

    Args:
        steps: Events of that kind.
        generations: Events of that kind.
        faults: Events of that kind.

    """

    def __init__(self, steps: Iterable[Event], generations: Iterable[Event], faults: Iterable[Event]) -> None:
        self._steps: dict[Process, list[tuple[float, int]]] = {}
        for event in steps:
            self._steps.setdefault(_process(event), []).append((event["t"], event["step"]))
        self._changes = [event for event in generations if event["slot"] is not None]
        self._fired: dict[Process, float] = {_process(event): event["t"] for event in faults}
        gaps = [after[0] - before[0] for times in self._steps.values() for before, after in pairwise(times)]
        self.median = median(gaps) if gaps else None

    def death(self, exit: Event) -> Death:
        """Describe the death that an exit is."""
        slot, incarnation = exit["slot"], exit["incarnation"]
        fired = self._fired.get((slot, incarnation))
        # The others go on as soon as a rank says what it raised; how long ago that was, its exit says.
        time = float(exit["t"]) - exit.get("ago", 0.0) if fired is None else fired
        told = [e for e in self._changes if e["t"] >= time and e["slot"] != slot and _tells_of(slot, e)]
        # Where each of the others learned of it; of two deaths at once, some may learn in one change and some in two.
        changes = list({_process(event): event for event in reversed(told)}.values())
        next_steps = [found for change in changes if (found := self._next_step(change)) is not None]
        later = [times[0][0] for other, times in self._steps.items() if other[0] == slot and other[1] > incarnation]
        return Death(
            slot=exit["slot"],
            incarnation=exit["incarnation"],
            how=exit["how"],
            time=time,
            member=exit["member"],
            step=self._step_at(time),
            recovery=min(next_steps) - time if next_steps else None,
            stall=self._excess(changes),
            reconfiguration=max((event["stall_ms"] / 1e3 for event in changes), default=None),
            respawn=min(later) - time if later else None,
        )

    def join(self, joined: Event) -> Join:
        """Describe the join that a joiner reports."""
        slot = joined["slot"]
        changes = [e for e in self._changes if slot in e["joined"] and e["t"] <= joined["t"]]
        changes = [e for e in changes if e["generation"] == changes[-1]["generation"] and e["slot"] != slot]
        return Join(slot, joined["incarnation"], joined["t"], joined["step"], self._excess(changes))

    def _step_at(self, time: float) -> int:
        return max((step for times in self._steps.values() for t, step in times if t <= time), default=0)

    def _next_step(self, change: Event) -> float | None:
        times = [t for t, _ in self._steps.get((change["slot"], change["incarnation"]), ())]
        position = bisect_left(times, change["t"])
        return times[position] if position < len(times) else None

    def _excess(self, changes: Sequence[Event]) -> float | None:
        """Seconds by which the longest of the steps in which these changes happened exceeded the median."""
        gaps: list[float] = []
        for event in changes:
            times = [t for t, _ in self._steps.get(_process(event), ())]
            position = bisect_left(times, event["t"])
            if 0 < position < len(times):
                gaps.append(times[position] - times[position - 1])
        return max(0.0, max(gaps) - self.median) if gaps and self.median is not None else None


def _tell(numbers: Sequence[int]) -> str:
    """The first few of them, for a sentence."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
