"""What must hold in every run, as rules that its events are replayed to. Each names what violates it.

Rules are fed event by event, in the order of time, and keep little of it, so that a long run can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_ft.events.audit import Audit
from lightning_ft.events.contents import Event, Process, process_of
from lightning_ft.events.kinds import mismatch

_RESPAWN_SECONDS = 90.0  # more than a slot ever waits for its next start
_MAX_EACH = 100

Verify = Callable[[str], "str | None"]
"""Returns what is wrong with the checkpoint at a path; None if nothing is."""


@dataclass(frozen=True)
class Violation:
    """Something that must not be.

    Args:
        rule: Which rule it violates.
        text: What is wrong, a sentence.
        time: When; None if it is at no certain time.

    """

    rule: str
    text: str
    time: float | None = None

    def __str__(self) -> str:
        return f"[{self.rule}] {self.text}"


class Rule:
    """Something that must hold.

    Args:
        name: Of the rule.
        told: What must hold, a sentence.
        kinds: The kinds of events that it is fed with.

    """

    name: str
    told: str
    kinds: tuple[str, ...]

    def feed(self, event: Event) -> None:
        """Take in one event."""

    def violations(self, audit: Audit) -> Iterable[Violation]:
        """Return what violates the rule; ``audit`` is what the same events add up to."""
        return ()


class WellFormed(Rule):
    """Events have the fields of their kind."""

    name, told, kinds = "well-formed", "Every event has the fields of its kind.", ()

    def __init__(self) -> None:
        self._found: list[Violation] = []
        self._known: set[tuple[Any, ...]] = set()  # what events of no violation looked like

    def admits(self, event: Event) -> bool:
        """Whether the event can be shown to the other rules."""
        signature = event.get("event"), tuple(event), tuple(map(type, event.values()))
        if signature in self._known:
            return True
        wrong = mismatch(event)
        if wrong is None:
            self._known.add(signature)
            return True
        if len(self._found) < _MAX_EACH:
            kind = event.get("event")
            self._found.append(Violation(self.name, f"Event {kind!r} of slot {event.get('slot')} {wrong}.", event.get("t")))
        return False

    def violations(self, audit: Audit) -> Iterable[Violation]:
        return self._found


class SamplesOnce(Rule):
    """Batches are trained once."""

    name, told, kinds = (
        "samples-once",
        "Every epoch trains each of its batches exactly once.",
        ("fit_end", "epoch", "resumed", "step"),
    )

    def __init__(self) -> None:
        self._is_whole = False
        self._begins_inside: bool | None = None  # in what another run began, whose events are not there

    def feed(self, event: Event) -> None:
        if event["event"] == "fit_end":
            self._is_whole = event["whole"]
        elif event["event"] == "epoch":
            self._is_whole = False
        elif self._begins_inside is None:
            self._begins_inside = event["event"] == "resumed" and event["step"] > 0

    def violations(self, audit: Audit) -> Iterable[Violation]:
        is_cut, is_late = not self._is_whole, bool(self._begins_inside)
        found = audit.data_problems(unfinished_epoch=is_cut, begun_before=is_late)
        return [Violation(self.name, text) for text in found]


class StepsContiguous(Rule):
    """Steps follow one another."""

    name, kinds = "steps-contiguous", ("step", "resumed", "events_dropped")
    told = "Steps are committed one after the other, and all ranks say the same of them."

    def __init__(self) -> None:
        self._before: int | None = None  # the next step follows this one
        self._found: list[Violation] = []

    def feed(self, event: Event) -> None:
        if event["event"] == "resumed":
            self._before = event["step"]
        elif event["event"] == "events_dropped":
            self._before = None
        elif self._before is not None:
            if event["step"] != self._before + 1:
                text = f"The training went on from step {self._before}, and the first step after it is {event['step']}."
                self._found.append(Violation(self.name, text, event["t"]))
            self._before = None

    def violations(self, audit: Audit) -> Iterable[Violation]:
        return [*self._found, *(Violation(self.name, text) for text in audit.step_problems())]


class _Checksums(Rule):
    """Compares what ranks hold at equal steps."""

    kinds = ("checksum", "joined", "rewound", "resumed", "exit", "step")
    of_joiners: bool

    def __init__(self) -> None:
        self._first: dict[tuple[int, str], tuple[str, Process, bool]] = {}
        self._pairs: list[tuple[int, float, Process, Process]] = []
        self._joiners: set[Process] = set()
        self._last_step: dict[Process, int] = {}
        self._died: set[Process] = set()

    def feed(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._last_step[process_of(event)] = event["step"]
        elif kind == "joined":
            self._joiners.add(process_of(event))
        elif kind == "checksum":
            self._compare(event)
        elif kind == "exit":
            if event["code"] != 0:
                self._died.add(process_of(event))
        else:
            for key in [key for key in self._first if key[0] > event["step"]]:
                del self._first[key]

    def _compare(self, event: Event) -> None:
        process = process_of(event)
        is_joiner = process in self._joiners
        self._joiners.discard(process)
        key = event["step"], event.get("shard", "")
        digest, other, was_joiner = self._first.setdefault(key, (event["digest"], process, is_joiner))
        if digest != event["digest"] and (is_joiner or was_joiner) == self.of_joiners:
            self._pairs.append((event["step"], event["t"], other, process))

    def violations(self, audit: Audit) -> Iterator[Violation]:
        for step, time, *pair in self._pairs:
            # What a rank that died then made of the step, the others may have made anew without it.
            if not any(process in self._died and self._last_step.get(process) == step for process in pair):
                (_, one, n), (_, other, m) = pair
                text = f"After step {step}, slots {one} (process {n}) and {other} (process {m}) hold other weights."
                yield Violation(self.name, text, time)


class ReplicasAlike(_Checksums):
    """Members hold the same."""

    name, told = (
        "replicas-alike",
        "After equal steps all replicas hold the same state, bit for bit.",
    )
    of_joiners = False


class JoinersAlike(_Checksums):
    """Joiners hold what their source holds."""

    name, told = "joiners-alike", "A rank that joins holds what the others hold, bit for bit."
    of_joiners = True


class DeathsRecovered(Rule):
    """Deaths are got over."""

    name, kinds = "deaths-recovered", ("exit", "spawn", "excluded", "control", "step", "stop", "run")
    told = "After a death the others go on, and the slot is started again or stays out."

    def __init__(self) -> None:
        self._missing: dict[tuple[int, int], Event] = {}
        self._found: list[Violation] = []
        self._last = 0.0

    def feed(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._last = event["t"]
            if self._missing:
                self._look(event["t"])
        elif kind == "exit":
            if event["code"] != 0 and event["member"]:
                self._missing[process_of(event)[:2]] = event
        elif kind in ("run", "stop") or (kind == "control" and event["command"] == "suspend"):
            self._missing.clear()
        elif event["slot"] is not None:
            self._missing.pop(process_of(event)[:2], None)

    def _look(self, now: float) -> None:
        for key, exit in list(self._missing.items()):
            if now > exit["t"] + _RESPAWN_SECONDS:
                del self._missing[key]
                text = f"Slot {key[1]} ({exit['how']}) was neither started again nor excluded."
                self._found.append(Violation(self.name, text, exit["t"]))

    def violations(self, audit: Audit) -> Iterator[Violation]:
        yield from self._found
        for death in audit.deaths:
            if death.member and death.recovery is None and death.went_on:
                text = f"No survivor that knew it went on after slot {death.slot} died ({death.how}) at step {death.step}."
                yield Violation(self.name, text, death.time)


class MembersAgree(Rule):
    """The membership is one."""

    name, kinds = "members-agree", ("generation",)
    told = "Each version of the membership is the next number, and those who adopt it know the same members."

    def __init__(self) -> None:
        self._published: dict[tuple[int, int], list[int]] = {}
        self._newest: dict[int, int] = {}
        self._found: list[Violation] = []

    def feed(self, event: Event) -> None:
        attempt, slot, _ = process_of(event)
        if slot is None:
            number = event["number"]
            newest = self._newest.get(attempt, number - 1)  # an earlier Trainer may have logged elsewhere
            if number != newest + 1:
                self._add(event, f"Generation {number} follows generation {newest}.")
            self._newest[attempt] = number
            self._published[attempt, number] = event["members"]
            return
        members = self._published.get((attempt, event["generation"]))
        if members is None and attempt not in self._newest:
            return
        if members is None:
            self._add(event, f"Slot {slot} adopted generation {event['generation']}, which was not published.")
        elif members != event["members"]:
            text = f"In generation {event['generation']}, slot {slot} knows the members {event['members']}, not {members}."
            self._add(event, text)
        elif slot not in members:
            self._add(event, f"Slot {slot} adopted generation {event['generation']} without being a member.")

    def _add(self, event: Event, text: str) -> None:
        self._found.append(Violation(self.name, text, event["t"]))

    def violations(self, audit: Audit) -> Iterable[Violation]:
        return self._found


class DeadAreSilent(Rule):
    """Who is gone commits nothing."""

    name, told, kinds = (
        "dead-are-silent",
        "Nobody commits a step who is not a member, or whose process is gone.",
        ("exit", "step"),
    )

    def __init__(self) -> None:
        self._gone: set[Process] = set()
        self._found: list[Violation] = []

    def feed(self, event: Event) -> None:
        process = process_of(event)
        if event["event"] == "exit":
            self._gone.add(process)
        elif process in self._gone:
            self._add(event, "after its process was gone")
        elif process[1] not in event.get("members", (process[1],)):
            self._add(event, "without being a member")

    def _add(self, event: Event, how: str) -> None:
        if len(self._found) < _MAX_EACH:
            text = f"Slot {event['slot']} (process {event['incarnation']}) committed step {event['step']} {how}."
            self._found.append(Violation(self.name, text, event["t"]))

    def violations(self, audit: Audit) -> Iterable[Violation]:
        return self._found


class CheckpointsIntact(Rule):
    """Checkpoints are there.

    Args:
        verify: Checks one; None: none is looked at.

    """

    name, kinds = "checkpoints-intact", ("checkpoint", "checkpoint_removed")
    told = "Every checkpoint that was saved, and neither replaced nor removed, is there and intact."

    def __init__(self, verify: Verify | None) -> None:
        self._verify = verify
        self.present: dict[str, Event] = {}
        self._removed: dict[str, int] = {}

    def feed(self, event: Event) -> None:
        if event["event"] == "checkpoint_removed":
            self._remove(event["path"])
        elif event["step"] > self._removed.get(event["path"], -1):  # else a slow rank tells what others told before
            self.present[event["path"]] = event
            for path in event.get("replaces", ()):
                if path != event["path"]:
                    self._remove(path)

    def _remove(self, path: str) -> None:
        if (event := self.present.pop(path, None)) is not None:
            self._removed[path] = event["step"]

    def violations(self, audit: Audit) -> Iterator[Violation]:
        for path, event in self.present.items() if self._verify is not None else ():
            wrong = self._verify(path)  # type: ignore[misc]
            if wrong is not None:
                yield Violation(self.name, f"The checkpoint of step {event['step']}, {path}: {wrong}.", event["t"])


def rules_of_a_fit() -> list[Rule]:
    """Return the rules of one training, new."""
    return [SamplesOnce(), StepsContiguous(), ReplicasAlike(), JoinersAlike(), DeathsRecovered()]


def rules_of_a_job(verify: Verify | None = None) -> list[Rule]:
    """Return the other rules, new, but for :class:`WellFormed`, which comes before all of them.

    Args:
        verify: Checks a checkpoint; None: none is looked at.

    """
    return [MembersAgree(), DeadAreSilent(), CheckpointsIntact(verify)]


def rules() -> list[tuple[str, str]]:
    """Return the name of each rule and what must hold."""
    return [(rule.name, rule.told) for rule in (WellFormed(), *rules_of_a_fit(), *rules_of_a_job())]
