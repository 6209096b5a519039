"""Replays a run's events: which batches were trained, which steps were committed, what each death and each join cost.

Pure over the events that :func:`~lightning_ft.events.log.read_events` returns; nothing is read or measured here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from lightning_ft.events.contents import Contents, Event, process_of
from lightning_ft.events.timeline import Death, Join, Timeline

__all__ = ["Audit", "Death", "EpochAudit", "Event", "GenerationAudit", "Join", "Replay", "audit"]


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
        return self.data_problems(unfinished_epoch=unfinished_epoch) + self.step_problems()

    def data_problems(self, *, unfinished_epoch: bool = False, begun_before: bool = False) -> list[str]:
        """Return what is wrong with the run's data; see :meth:`problems`.

        Args:
            unfinished_epoch: Whether training was meant to stop in the middle of the last epoch.
            begun_before: Whether a part of the first epoch was trained in a run whose events are not there.

        """
        found: list[str] = []
        # A later one may have been begun by a run before this one, which resumed from an earlier checkpoint.
        last = max((number for number, epoch in self.epochs.items() if epoch.num_trained), default=-1)
        for number, epoch in sorted(self.epochs.items()):
            is_first = begun_before and number == min(self.epochs)
            is_cut = is_first or (unfinished_epoch and number >= last)
            lists = (
                ("twice", epoch.twice),
                ("never", () if is_cut else epoch.never),
                ("without having it", epoch.unknown),
            )
            found += [f"Epoch {number} trained {_tell(tickets)} {how}." for how, tickets in lists if tickets]
            if not epoch.announced and not is_first:
                found.append(f"Nobody said how many batches epoch {number} has.")
        if self.partial:
            found.append(f"The global batch is constant, but steps {_tell(self.partial)} lack a part of theirs.")
        return found

    def step_problems(self) -> list[str]:
        """Return what is wrong with the run's steps; see :meth:`problems`."""
        found: list[str] = []
        if self.steps_lost:
            found.append(f"No rank committed steps {_tell(self.steps_lost)}.")
        if self.conflicts:
            found.append(f"Ranks disagree about what is in steps {_tell(self.conflicts)}.")
        return found


class Replay:
    """An audit that is fed event by event, in the order of time, so that a long run needs no memory for its events."""

    def __init__(self) -> None:
        self.contents = Contents()
        self.timeline = Timeline()
        self._exits: list[Event] = []
        self._joins: list[Event] = []
        self._epochs: dict[int, Event] = {}
        self._generations: list[GenerationAudit] = []
        self._exit_code: int | None = None
        self.handlers: dict[str, Callable[[Event], None]] = {
            "run": self._on_run,
            "step": self._on_step,
            "accumulated": self.contents.tell,
            "rewound": lambda event: self.contents.rewind(event["step"], event["batch"], process_of(event)[0]),
            "resumed": lambda event: self.contents.rewind(event["step"]),
            "generation": self._on_generation,
            "fault": self.timeline.tell_fault,
            "begun_anew": self.timeline.tell_begun_anew,
            "exit": self._exits.append,
            "joined": self._joins.append,
            "epoch": self._on_epoch,
            "finish": self._on_finish,
        }
        """What takes in an event, by its kind; others do not matter."""

    def feed(self, event: Event) -> None:
        """Take in one event."""
        handler = self.handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def _on_run(self, event: Event) -> None:
        self._exit_code = None

    def _on_finish(self, event: Event) -> None:
        self._exit_code = event["code"]

    def _on_epoch(self, event: Event) -> None:
        self._epochs[event["epoch"]] = event

    def _on_step(self, event: Event) -> None:
        self.contents.tell(event)
        self.timeline.tell_step(event)

    def _on_generation(self, event: Event) -> None:
        if event["slot"] is None:
            self._generations.append(_generation(event))
            self.timeline.tell_published(event)
        else:
            self.timeline.tell_change(event)

    def finish(self) -> Audit:
        """Return what the events so far add up to."""
        exits, timeline = self._exits, self.timeline
        died = {process_of(event) for event in exits if event["code"] != 0}
        conflicts = self.contents.settle(died)
        timeline.settle()
        steps = self.contents.steps
        return Audit(
            epochs=_audit_epochs(self.contents, self._epochs),
            deaths=tuple(timeline.death(exit) for exit in exits if exit["code"] != 0 or exit["member"]),
            joins=tuple(timeline.join(joined) for joined in self._joins),
            generations=tuple(self._generations),
            steps=tuple(steps),
            steps_lost=tuple(chain.from_iterable(range(before + 1, after) for before, after in pairwise(steps))),
            conflicts=tuple(conflicts),
            partial=tuple(sorted(_partial(self.contents, self._epochs))),
            median_step=timeline.median,
            exit_code=self._exit_code,
        )


def audit(events: Iterable[Event]) -> Audit:
    """Replay the events of one run, or of several of which each resumed the one before.

    Args:
        events: Those of all ranks and of the supervisor, sorted by time.

    Returns:
        What they add up to.

    """
    replay = Replay()
    for event in events:
        replay.feed(event)
    return replay.finish()


def _audit_epochs(contents: Contents, announced: Mapping[int, Event]) -> dict[int, EpochAudit]:
    trained: dict[int, array[int]] = {}
    for _, content in contents.items():
        if content.epoch is not None:
            trained.setdefault(content.epoch, array("q")).extend(content.tickets)
    return {
        number: _epoch(trained.get(number, array("q")), announced.get(number)) for number in sorted({*trained, *announced})
    }


def _partial(contents: Contents, announced: Mapping[int, Event]) -> Iterator[int]:
    """The steps that have a part of a global batch only."""
    sizes = {
        number: (event["global_batch"], event["num_tickets"])
        for number, event in announced.items()
        if "global_batch" in event
    }
    for place, content in contents.items() if sizes else ():
        if content.epoch in sizes and isinstance(place, int):
            size, num_tickets = sizes[content.epoch]
            tickets = set(content.tickets)
            whole = {first + i for first in {ticket // size * size for ticket in tickets} for i in range(size)}
            if any(ticket not in tickets for ticket in whole if ticket < num_tickets):
                yield place


def _epoch(trained: array[int], announced: Event | None) -> EpochAudit:
    num_tickets = None if announced is None else announced["num_tickets"]
    tickets, counts = np.unique(np.frombuffer(trained, dtype=np.int64), return_counts=True)
    expected = np.arange(num_tickets or 0)
    return EpochAudit(
        num_tickets=num_tickets,
        announced=announced is not None,
        num_trained=len(trained),
        twice=tuple(tickets[counts > 1].tolist()),
        never=tuple(np.setdiff1d(expected, tickets, assume_unique=True).tolist()),
        unknown=() if num_tickets is None else tuple(tickets[tickets >= num_tickets].tolist()),
    )


def _generation(event: Event) -> GenerationAudit:
    dead = tuple(sorted(death["slot"] for death in event["dead"]))
    return GenerationAudit(event["number"], event["reason"], tuple(event["members"]), dead, event["t"])


def _tell(numbers: Sequence[int]) -> str:
    """The first few of them, for a sentence."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
