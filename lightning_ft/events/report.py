"""The report of a run: what a reader should know who was not there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lightning_ft.events.analysis import Analysis, Analyzer
from lightning_ft.events.audit import Audit
from lightning_ft.events.history import EventStream
from lightning_ft.events.rules import CheckpointsIntact, Verify, rules
from lightning_ft.events.story import EXCLUDED, Story
from lightning_ft.events.timeline import Death, Join

_WIDTH = 72
_GLYPHS = {"death": "x", "hung": "x", "join": "+", "excluded": "!"}
_SHOWN = 20


@dataclass(frozen=True)
class Report:
    """A run, told.

    Args:
        directory: Where its events are.
        analysis: Which rules it violates.
        story: What happened.
        num_torn: Lines that were cut off by deaths.
        has_verified: Whether checkpoints were looked at.

    """

    directory: Path
    analysis: Analysis
    story: Story
    num_torn: int
    has_verified: bool

    @classmethod
    def of(cls, directory: str | os.PathLike[str], verify: Verify | None = None) -> Report:
        """Read the events of a run, and of those that it resumed.

        Args:
            directory: Where they are.
            verify: Says what is wrong with a checkpoint; if not given, checkpoints are not looked at.

        Raises:
            FileNotFoundError: If there are none.

        """
        stream, analyzer, story = EventStream(directory), Analyzer(verify), Story()
        for event in stream:
            if analyzer.feed(event):
                story.feed(event)
        return cls(Path(directory), analyzer.finish(), story, stream.num_torn, verify is not None)

    @property
    def deaths(self) -> list[Death]:
        """Those of members, by themselves."""
        ended = (death for fit in self.analysis.fits for death in fit.deaths if death.member)
        return [death for death in ended if not death.how.startswith(EXCLUDED)]

    @property
    def excluded(self) -> list[Death]:
        """Ends of ranks that were excluded, or suspended."""
        return [death for fit in self.analysis.fits for death in fit.deaths if death.how.startswith(EXCLUDED)]

    @property
    def joins(self) -> list[Join]:
        """Returns of ranks."""
        return [join for fit in self.analysis.fits for join in fit.joins]

    @property
    def audit(self) -> Audit:
        """What the last training adds up to."""
        return self.analysis.fits[-1]

    def judged_rules(self) -> Iterator[tuple[str, str, int | None]]:
        """Yield the name of each rule, what must hold, and how often it was violated; None if that was not looked at."""
        counts = Counter(violation.rule for violation in self.analysis.violations)
        for name, told in rules():
            yield name, told, None if name == CheckpointsIntact.name and not self.has_verified else counts[name]

    def outcome(self) -> str:
        """Return how the job ended."""
        code = self.audit.exit_code
        if not code:
            return "has not ended" if code is None else "ended well"
        return f"ended with code {code}" + (f": {self.story.error}" if self.story.error else "")

    def summary(self) -> list[tuple[str, str]]:
        """Return names and values, the most important first."""
        fits, story = self.analysis.fits, self.story
        steps, lost = sum(len(fit.steps) for fit in fits), sum(len(fit.steps_lost) for fit in fits)
        rows = [
            ("job", f"{story.num_slots or len(story.spans)} slots, {duration(story.seconds)}, {self.outcome()}"),
            ("training", f"{steps} steps in {sum(len(fit.epochs) for fit in fits)} epochs, {lost} lost{self._pace()}"),
            (
                "deaths",
                f"{len(self.deaths)}{_spread([death.stall for death in self.deaths], 'its step took longer by')}",
            ),
            (
                "returns",
                f"{len(self.joins)}{_spread([join.gap for join in self.joins], 'the others waited longer by')}",
            ),
        ]
        if self.excluded:
            rows.insert(3, ("excluded", f"{len(self.excluded)}, suspended ones included"))
        saved = list(story.checkpoints.values())
        stalls = _spread([checkpoint.stall for checkpoint in saved], "training waited")
        there = sum(not checkpoint.gone for checkpoint in saved)
        rows.append(("checkpoints", f"{len(saved)} saved, {there} to be there, {len(story.failed_saves)} failed{stalls}"))
        goodput = story.goodput(self.audit)
        if goodput is not None:
            rows.append(("goodput", f"{100 * goodput:.1f} % {self.account()}{self._losses()}"))
        if len(story.run_ids) > 1:
            rows.append(("attempts", f"{len(story.run_ids)}: {', '.join(story.run_ids)}"))
        if story.verdicts:
            outcomes = Counter(verdict["outcome"] for verdict in story.verdicts)
            rows.append(("verdicts", ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())))
        return rows

    def _pace(self) -> str:
        return "" if self.audit.median_step is None else f", {1e3 * self.audit.median_step:.3g} ms a step"

    def _losses(self) -> str:
        lost = {kind: seconds for kind, seconds in self.story.time_lost(self.audit).items() if seconds > 0}
        whole = self.story.accounted_seconds or 1.0
        return "".join(f"; {lost_to(kind)} {100 * seconds / whole:.1f} %" for kind, seconds in lost.items())

    def account(self) -> str:
        """Return whose account of which time it is."""
        return f"of {duration(self.story.accounted_seconds)} ({self.story.source})"

    def lines(self) -> Iterator[str]:
        """Return the report for a terminal."""
        yield f"Run {self.directory}"
        for name, value in self.summary():
            yield f"  {name:<12}{value}"
        yield ""
        yield from self._timeline()
        notable = [mark for mark in self.story.marks if mark.kind not in ("save", "join")]
        for mark in notable[:_SHOWN]:
            yield f"  {duration(mark.time - self.story.begin):>10}  {mark.text}"
        if len(notable) > _SHOWN:
            yield f"  {len(notable) - _SHOWN} more in the HTML report"
        yield ""
        for name, told, count in self.judged_rules():
            yield f"  {'FAIL' if count else '?   ' if count is None else 'ok  '}  {name:<20}{told}"
        for violation in self.analysis.violations[:_SHOWN]:
            yield f"  {violation}"
        if len(self.analysis.violations) > _SHOWN:
            yield f"  ... and {len(self.analysis.violations) - _SHOWN} more"
        if self.num_torn or self.story.counts["events_dropped"]:
            dropped = self.story.counts["events_dropped"]
            yield f"  {self.num_torn} lines were cut off by a death; events were dropped {dropped} times."

    def _timeline(self) -> Iterator[str]:
        begin, seconds = self.story.begin, self.story.seconds or 1.0

        def column(time: float) -> int:
            return min(_WIDTH - 1, max(0, int((min(time, self.story.end) - begin) / seconds * _WIDTH)))

        for slot, spans in sorted(self.story.spans.items()):
            row = [" "] * _WIDTH
            for first, last in spans:
                row[column(first) : column(last) + 1] = "=" * (column(last) + 1 - column(first))
            for mark in self.story.marks:
                if mark.slot == slot and mark.kind in _GLYPHS and row[column(mark.time)] != "x":
                    row[column(mark.time)] = _GLYPHS[mark.kind]
            yield f"  slot {slot:<4}|{''.join(row)}|"
        saves = [" "] * _WIDTH
        for checkpoint in self.story.checkpoints.values():
            saves[column(checkpoint.time)] = "^"
        yield f"  saves    |{''.join(saves)}|  = takes part, x dies, ! is excluded, + is back, ^ checkpoint"


def lost_to(kind: str) -> str:
    """Return what time is lost to, for people."""
    return "missing replicas" if kind == "missing" else kind


def duration(seconds: float) -> str:
    """Return a time for people: "850 ms", "12.5 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _spread(values: list[float | None], what: str) -> str:
    known = [value for value in values if value is not None]
    return f"; {what} {duration(median(known))} (median), {duration(max(known))} (longest)" if known else ""
