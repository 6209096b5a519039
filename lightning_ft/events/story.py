"""What a report tells of a run: who took part when, what happened, curves, checkpoints and where the time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_ft.events.audit import Audit
from lightning_ft.events.contents import Event

_MAX_POINTS = 2000
_MAX_MARKS = 20_000
EXCLUDED = "excluded: "
"""How the end of a process is told that was ended because it was not to be trusted, or because somebody asked for it."""
LOSSES = ("startup", "restart", "recovery", "joining", "missing", "recomputation", "checkpoint")
"""What time is lost to, in the order in which it is told."""


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Args:
        time: When.
        kind: What: "death", "join", "save", "rewound", ...
        slot: Whom it happened to; None: all of them.
        text: In words.

    """

    time: float
    kind: str
    slot: int | None
    text: str


@dataclass
class Checkpoint:
    """A checkpoint that was saved.

    Args:
        path: Where.
        step: Of which step.
        time: When it was there.
        stall: Seconds that the training waited for it.
        gone: Whether it was replaced or removed since.

    """

    path: str
    step: int
    time: float
    stall: float = 0.0
    gone: bool = False


class Curve:
    """Values by step, in a bounded number of points: the lowest, the mean and the highest of as many steps each."""

    def __init__(self) -> None:
        self._points: list[list[float]] = []  # step, lowest, sum, highest, count
        self._width = 1
        self.bad: list[int] = []
        """Steps with a value that is not finite."""

    def add(self, step: int, value: float) -> None:
        """Take in the value of a step."""
        if not math.isfinite(value):
            if len(self.bad) < _MAX_MARKS:
                self.bad.append(step)
            return
        last = self._points[-1] if self._points else None
        if last is not None and last[4] < self._width and 0 <= step - last[0] < self._width:
            last[1], last[2], last[3] = min(last[1], value), last[2] + value, max(last[3], value)
            last[4] += 1
            return
        self._points.append([step, value, value, value, 1])
        if len(self._points) > 2 * _MAX_POINTS:
            self._points = list(_merged(self._points))
            self._width *= 2

    def points(self) -> list[tuple[float, float, float, float]]:
        """Return step, lowest, mean and highest of each point."""
        return [(step, low, total / count, high) for step, low, total, high, count in self._points]


def _merged(points: list[list[float]]) -> Iterator[list[float]]:
    for i in range(0, len(points) - 1, 2):
        one, other = points[i], points[i + 1]
        yield [one[0], min(one[1], other[1]), one[2] + other[2], max(one[3], other[3]), one[4] + other[4]]
    if len(points) % 2:
        yield points[-1]


@dataclass
class Story:
    """Fed with the events of a run, in the order of time."""

    begin: float = math.inf
    end: float = -math.inf
    run_ids: list[str] = field(default_factory=list)
    num_slots: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    spans: dict[int, list[list[float]]] = field(default_factory=dict)
    """By slot: from when to when it was a member."""
    marks: list[Mark] = field(default_factory=list)
    loss: Curve = field(default_factory=Curve)
    grad_norm: Curve = field(default_factory=Curve)
    checkpoints: dict[tuple[str, int], Checkpoint] = field(default_factory=dict)
    failed_saves: dict[tuple[str, int], str] = field(default_factory=dict)
    verdicts: list[Event] = field(default_factory=list)
    error: str | None = None
    _present: dict[str, Checkpoint] = field(default_factory=dict)
    _since: float = 0.0
    _members: tuple[int, ...] = ()
    _goodput: Event | None = None
    _rewound: dict[tuple[int, int], int] = field(default_factory=dict)
    _lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    _started: float | None = None  # a job that has made no step yet
    _newest: tuple[int, str] = (-1, "")

    def feed(self, event: Event) -> None:
        """Take in one event."""
        time, kind = event["t"], event["event"]
        self.counts[kind] += 1
        if time < self.begin and kind != "resumed":
            self.begin = time
        if kind == "step":
            if self._started is not None:
                self._lost["restart" if len(self.run_ids) > 1 else "startup"] += max(0.0, time - self._started)
                self._started = None
        else:
            handler = getattr(self, f"_on_{kind}", None)
            if handler is not None:
                handler(event)
        if time > self.end:
            self.end = time

    # Members.

    def _on_run(self, event: Event) -> None:
        self._started = self.end if self.run_ids else event["t"]
        self.run_ids.append(event["run_id"])
        self.num_slots = max(self.num_slots, event["num_slots"])

    def _on_generation(self, event: Event) -> None:
        if event["slot"] is None:
            self._become(tuple(event["members"]), event["t"])

    def _become(self, members: tuple[int, ...], time: float) -> None:
        if len(self._members) < self.num_slots and self._members:
            self._lost["missing"] += self._missing(time)
        for slot in self._members:
            if slot not in members:
                self.spans[slot][-1][1] = time
        for slot in members:
            if slot not in self._members:
                self.spans.setdefault(slot, []).append([time, math.inf])
        self._members, self._since = members, time

    def _missing(self, time: float) -> float:
        return (time - self._since) * (1 - len(self._members) / self.num_slots)

    def _on_exit(self, event: Event) -> None:
        slot, code = event["slot"], event["code"]
        if event["how"].startswith(EXCLUDED):
            self._mark(event, "excluded", f"slot {slot} was {event['how']}")
        elif code != 0 or event["member"]:
            self._mark(event, "death" if event["member"] else "end", f"slot {slot} died: {event['how']}")
        elif slot in self._members:
            self._become(tuple(member for member in self._members if member != slot), event["t"])

    def _on_finish(self, event: Event) -> None:
        self._become((), event["t"])
        self.error = event["error"]

    def _on_joined(self, event: Event) -> None:
        self._mark(event, "join", f"slot {event['slot']} joined after step {event['step']}")

    def _on_excluded(self, event: Event) -> None:
        self._mark(event, "excluded", f"slot {event['slot']} stays out")

    def _on_hung(self, event: Event) -> None:
        self._mark(event, "hung", f"slot {event['slot']}: {event['how']}")

    def _on_control(self, event: Event) -> None:
        target = event.get("target")
        words = [event["command"], event.get("kind") or "", "" if target is None else f"slot {target}"]
        outcome = "" if event["accepted"] else f" (refused: {event['answer']})"
        self._mark({**event, "slot": target}, "control", f"asked for: {' '.join(filter(None, words))}{outcome}")

    def _on_straggler(self, event: Event) -> None:
        self._mark({**event, "slot": event["straggler"]}, "straggler", f"slot {event['straggler']} is slow")

    def _on_corruption(self, event: Event) -> None:
        self._mark({**event, "slot": None}, "corruption", f"ranks differ after step {event['step']}: {event['action']}")

    def _on_stall(self, event: Event) -> None:
        self._mark({**event, "slot": None}, "stall", event["message"])

    def _mark(self, event: Event, kind: str, text: str) -> None:
        if len(self.marks) < _MAX_MARKS:
            self.marks.append(Mark(event["t"], kind, event["slot"], text))

    # Training.

    def _on_metrics(self, event: Event) -> None:
        for name, curve in (("loss", self.loss), ("grad_norm", self.grad_norm)):
            value = event.get(name)
            if isinstance(value, int | float):
                curve.add(event["step"], value)

    def _on_verdict(self, event: Event) -> None:
        if len(self.verdicts) < _MAX_MARKS:
            self.verdicts.append(event)

    def _on_goodput(self, event: Event) -> None:
        self._goodput = event

    def _on_rewound(self, event: Event) -> None:
        key = event["step"], event["lost"]
        if key not in self._rewound:
            self._mark({**event, "slot": None}, "rewound", f"back to step {event['step']}; {event['lost']} steps again")
        self._rewound[key] = event["lost"]

    def _on_begun_anew(self, event: Event) -> None:
        self._mark(event, "begun_anew", f"nobody was left who held the state after step {event['step']}: all began again")

    def _on_resumed(self, event: Event) -> None:
        if self._newest != (event["step"], event["path"]):
            self._newest = event["step"], event["path"]
            self._mark({**event, "slot": None}, "resumed", f"goes on from {event['path']} (step {event['step']})")

    # Checkpoints.

    def _on_checkpoint(self, event: Event) -> None:
        path, step = event["path"], event["step"]
        known = self.checkpoints.get((path, step))
        if known is None:
            self._remove(path)
            known = self.checkpoints[path, step] = self._present[path] = Checkpoint(path, step, event["t"])
            self._mark({**event, "slot": None}, "save", f"checkpoint of step {step}")
        known.stall = max(known.stall, event.get("stall_ms", 0.0) / 1e3)
        for replaced in event.get("replaces", ()):
            if replaced != path:
                self._remove(replaced)

    def _on_checkpoint_removed(self, event: Event) -> None:
        self._remove(event["path"])

    def _on_checkpoint_failed(self, event: Event) -> None:
        key = event["path"], event["step"]
        if key not in self.failed_saves:
            self.failed_saves[key] = event["error"]
            self._mark({**event, "slot": None}, "failed_save", event["error"])

    def _remove(self, path: str) -> None:
        if (checkpoint := self._present.pop(path, None)) is not None:
            checkpoint.gone = True

    # What it adds up to.

    @property
    def seconds(self) -> float:
        """From the first event to the last one."""
        return max(0.0, self.end - self.begin)

    def time_lost(self, audit: Audit) -> dict[str, float]:
        """Return the seconds that were lost, by what they were lost to.

        As the newest account of ``TrainingHealth`` has it, or estimated from what else was recorded.
        """
        if self._goodput is not None:
            return {kind: float(self._goodput.get(f"lost_{kind}", 0.0)) for kind in LOSSES}
        lost = dict(self._lost)
        lost["recovery"] = sum(death.stall or 0.0 for death in audit.deaths)
        lost["joining"] = sum(join.gap or 0.0 for join in audit.joins)
        lost["recomputation"] = sum(self._rewound.values()) * (audit.median_step or 0.0)
        lost["checkpoint"] = sum(checkpoint.stall for checkpoint in self.checkpoints.values())
        return lost

    @property
    def accounted_seconds(self) -> float:
        """The time that this is an account of: from the first fit's set-up, or of all that was recorded."""
        return self.seconds if self._goodput is None else float(self._goodput.get("seconds", self.seconds))

    def goodput(self, audit: Audit) -> float | None:
        """Return the part of the time that was not lost; None if no time passed."""
        if self._goodput is not None:
            return float(self._goodput.get("goodput", math.nan))
        return max(0.0, 1 - sum(self.time_lost(audit).values()) / self.seconds) if self.seconds else None

    @property
    def source(self) -> str:
        """Who kept the account of the time."""
        return "estimated from the log" if self._goodput is None else "by TrainingHealth"
