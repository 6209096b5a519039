"""Replays the events of a run to all rules, and says which were violated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_ft.events.audit import Audit, Replay
from lightning_ft.events.contents import Event
from lightning_ft.events.history import EventStream
from lightning_ft.events.rules import Rule, Verify, Violation, WellFormed, rules_of_a_fit, rules_of_a_job

_MAX_HELD = 10_000


@dataclass(frozen=True)
class Analysis:
    """What came of it.

    Args:
        fits: What the events of each training add up to; a script may fit several times.
        violations: Of the rules, of one rule after the other.
        num_events: How many there were.

    """

    fits: tuple[Audit, ...]
    violations: tuple[Violation, ...]
    num_events: int


class Analyzer:
    """Takes in events one by one, in the order of time.

    Args:
        verify: Checks a checkpoint; None: none is looked at.

    """

    def __init__(self, verify: Verify | None = None) -> None:
        self._form = WellFormed()
        self._job_rules = rules_of_a_job(verify)
        self._fits: list[Audit] = []
        self._violations: list[Violation] = []
        self._num_events = 0
        self._newest = 0
        self._held: list[Event] | None = None  # since a fit began of which it is open whether it is another training
        self._is_resumed = False
        self._begin()

    def _begin(self) -> None:
        self._replay = Replay()
        self._fit_rules = rules_of_a_fit()
        self._feeds: dict[str, list[Callable[[Event], None]]] = {
            kind: [handler] for kind, handler in self._replay.handlers.items()
        }
        for rule in (*self._fit_rules, *self._job_rules):
            for kind in rule.kinds:
                self._feeds.setdefault(kind, []).append(rule.feed)

    def feed(self, event: Event) -> bool:
        """Take in one event; return whether it has the fields of its kind."""
        self._num_events += 1
        if not self._form.admits(event):
            return False
        kind = event["event"]
        if self._held is not None:
            self._hold(event, kind)
            return True
        if kind == "step":
            self._newest = event["step"]
            self._is_resumed = False
        elif kind == "resumed":
            self._is_resumed = True
        elif kind == "fit" and self._newest and not self._is_resumed:
            self._held = [event]
            return True
        self._pass_on(event, kind)
        return True

    def _pass_on(self, event: Event, kind: str) -> None:
        for feed in self._feeds.get(kind, ()):
            feed(event)

    def _hold(self, event: Event, kind: str) -> None:
        """The first step of a fit says whether it goes on with the training before, or is another one."""
        assert self._held is not None
        self._held.append(event)
        is_another = kind == "step" and event["step"] <= self._newest
        if kind not in ("step", "resumed") and len(self._held) < _MAX_HELD:
            return
        held, self._held = self._held, None
        if is_another:
            self._end()
            self._begin()
            self._newest = 0
        self._num_events -= len(held)
        for each in held:
            if each["event"] == "fit":
                self._num_events += 1
                self._pass_on(each, "fit")
            else:
                self.feed(each)

    def _end(self) -> None:
        self._fits.append(self._replay.finish())
        self._judge(self._fit_rules)

    def _judge(self, rules: Iterable[Rule]) -> None:
        for rule in rules:
            self._violations += rule.violations(self._fits[-1])

    def finish(self) -> Analysis:
        """Return what the events add up to; nothing can be fed afterwards."""
        for event in self._held or ():
            self._pass_on(event, event["event"])
        self._end()
        self._judge([self._form, *self._job_rules])
        return Analysis(tuple(self._fits), tuple(self._violations), self._num_events)


def analyze(events: Iterable[Event] | str | os.PathLike[str], verify: Verify | None = None) -> Analysis:
    """Replay a run to all rules.

    Args:
        events: Of the run, sorted by time, or the directory that they are in; then those of the runs that it resumed
            are read, too.
        verify: Returns what is wrong with the checkpoint at a path, or None; if not given, checkpoints are not looked at.

    """
    if isinstance(events, str | os.PathLike):
        events = EventStream(events)
    analyzer = Analyzer(verify)
    for event in events:
        analyzer.feed(event)
    return analyzer.finish()
