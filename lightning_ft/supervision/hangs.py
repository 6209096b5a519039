"""Who keeps the others waiting, and how long that may take: pure, time is an argument.

Nothing is sent while all goes well. Ranks say when they have waited for a while; those that do not wait then are late. The
supervisor asks them what they do. The one that has not moved for longer than is usual for that is hung. If most of them do
not move, it is no rank's fault: storage or the machine stalls, and nobody is killed for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import FromRank

_FACTOR = 5.0  # how much longer than ever before something may take
_STEP_SECONDS = 60.0  # for what happens in every step, if it was always fast
_OTHER_SECONDS = 1800.0  # for what a rank may do alone once in a while, as under `ddp`
_STOPPED_SECONDS = 30.0  # a process that was stopped does nothing: no need for more patience
_ASKS = 5  # how often ranks are asked within the limit of a step
_ANSWER_SECONDS = 1.0
_STUCK_SECONDS = 30.0  # all wait for each other
_LATE_WAKE_UP = 2.0  # the supervisor itself stood still
_NEVER = float("-inf")
_STEP = ("loader", "training step", "evaluation step")


@dataclass
class Sight:
    """What is known of one process.

    Args:
        doing: What its training thread did when that was last heard of.
        moved: When it began that.
        place: Where in the code it was then.
        stacks: All its threads.
        asked: When it was asked.
        answered: When it answered.
        stopped: Whether the kernel says that it is stopped, as by SIGSTOP.

    """

    doing: str = "set-up"
    moved: float = _NEVER
    place: str = ""
    stacks: str = ""
    asked: float = _NEVER
    answered: float = _NEVER
    stopped: bool = False

    def seen(self, now: float) -> None:
        """It exists."""
        if self.moved == _NEVER:
            self.moved = now

    def note(self, message: FromRank, now: float) -> None:
        """It said something."""
        match message["type"]:
            case "begin" | "end":  # what it does before or between Trainer calls is set-up
                self.doing, self.moved = "set-up", now
            case "progress":
                self.doing, self.moved = "callbacks", now
            case "answer":
                self.answered, self.stopped = now, False
                self.doing, self.moved = message["doing"], now - message["quiet"]
                self.place, self.stacks = message["place"], message["stacks"]

    @property
    def is_silent(self) -> bool:
        """Whether it owes an answer."""
        return self.answered < self.asked

    def describe(self) -> str:
        """Return what it does, for a sentence."""
        if self.stopped:
            return "stopped (SIGSTOP)"
        if self.is_silent:
            return f"does not answer, last seen in {self.doing}"
        return f"in {self.doing}" + (f" at {self.place}" if self.place else "")


class Limits:
    """How long a member may keep the others waiting: as the user said, else learned from what was seen."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._reached: Counter[str] = Counter()

    def of(self, doing: str, policy: Policy) -> float:
        """Return the limit, in seconds."""
        given = policy.setup_timeout if doing == "set-up" else policy.checkpoint_timeout
        if doing in (*_STEP, "callbacks"):
            given = policy.timeout
        if given is not None:
            return given
        floor = max(_STEP_SECONDS if doing in _STEP else _OTHER_SECONDS, policy.timeout or 0.0)
        learned = max(floor, _FACTOR * self._longest.get(doing, 0.0)) * 2.0 ** self._reached[doing]
        return max(min(learned, policy.stall_timeout), policy.timeout or 0.0)

    def of_stopped(self, policy: Policy) -> float:
        """Return the limit of a process that is stopped, whatever it did."""
        return policy.timeout or min(_STOPPED_SECONDS, self.of("training step", policy))

    def observe(self, doing: str, seconds: float) -> None:
        """Others waited for this, and it ended well."""
        self._longest[doing] = max(seconds, self._longest.get(doing, 0.0))

    def reached(self, doing: str) -> None:
        """Somebody was killed for it; should that have been wrong, the next one has more time."""
        self._reached[doing] += 1


@dataclass
class Findings:
    """What is to be done.

    Args:
        ask: Whether to ask all what they do.
        hung: Slots that hang, and a sentence about each.
        retry: Whether the operation in which all wait for each other is to be tried again.
        notices: What to tell the user.
        error: Why the job cannot go on.

    """

    ask: bool = False
    hung: dict[int, str] = field(default_factory=dict)
    retry: bool = False
    notices: list[str] = field(default_factory=list)
    error: str | None = None


class Watch:
    """Watches processes that wait for each other."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.deadline: float | None = None
        """When :meth:`look` is to be called even if nothing happens."""
        self._late: dict[int, tuple[str, float]] = {}  # what they do, and since when they are waited for
        self._asked = _NEVER
        self._resumed = _NEVER
        self._stalled_since: float | None = None
        self._tell_at = 0.0

    def look(
        self, sights: Mapping[int, Sight], waiting: Mapping[int, float], is_stuck: bool, policy: Policy, now: float
    ) -> Findings:
        """Compare what is known with what is allowed.

        Args:
            sights: All that must come together, by slot.
            waiting: Those who wait for the others, and since when.
            is_stuck: If all of them wait: whether for each other, and not for the supervisor.
            policy: What the user asked for.
            now: The time.

        """
        if self.deadline is not None and now > self.deadline + _LATE_WAKE_UP:
            self.resume(now)  # the supervisor stood still, so perhaps everybody did
        self.deadline = None
        for sight in sights.values():
            sight.seen(now)
        late = {slot: sight for slot, sight in sights.items() if slot not in waiting}
        findings = Findings()
        stalled_since = None
        if late:
            stalled_since = self._judge_late(sights, late, waiting, policy, now, findings)
        elif is_stuck:
            self._judge_stuck(sights, max(waiting.values()), policy, now, findings)
        self._learn(sights, late if waiting else {}, min(waiting.values(), default=now), now)
        self._tell_stall(stalled_since, sights, waiting, policy, now, findings)
        return findings

    def resume(self, now: float) -> None:
        """Count no wait from before ``now``."""
        self._resumed = now

    def _judge_late(
        self,
        sights: Mapping[int, Sight],
        late: Mapping[int, Sight],
        waiting: Mapping[int, float],
        policy: Policy,
        now: float,
        findings: Findings,
    ) -> float | None:
        """Find out who is hung; return since when nothing moves if it is no rank's fault."""
        since = min(waiting.values()) if waiting else max(sight.moved for sight in late.values())
        since = max(since, self._resumed)
        self._ask(since, policy, now, findings)
        starts = {slot: max(since, sight.moved) for slot, sight in late.items()}
        limits = {slot: self._limit(sight, policy, now) for slot, sight in late.items()}
        dues = {slot: self._due(late[slot], starts[slot] + limits[slot], since, policy, now) for slot in late}
        dues |= {slot: since + self.limits.of_stopped(policy) for slot, sight in sights.items() if sight.stopped}
        overdue = [slot for slot, due in dues.items() if now >= due and sights[slot].asked >= since]
        self._wake_at(now, *dues.values())
        num_quiet = sum(now - starts[slot] >= limits[slot] / 2 for slot in late)
        if waiting and (len(sights) <= 2 or 2 * num_quiet <= len(sights)):
            hung = overdue
        else:
            hung = [slot for slot in overdue if waiting and sights[slot].stopped]
        if len(hung) == len(sights):  # somebody must be left who holds the state
            hung = []
        for slot in hung:
            findings.hung[slot] = f"hung for {now - starts.get(slot, since):.0f} s, {sights[slot].describe()}"
            if not sights[slot].stopped:
                self.limits.reached(sights[slot].doing)
        is_stalled = len(overdue) > len(hung) and (bool(waiting) or len(overdue) == len(late))
        if not waiting and all(sight.doing == "set-up" and not sight.is_silent for sight in late.values()):
            is_stalled = False  # under `ddp`, too, all may prepare their data for hours
        return max(starts.values()) if is_stalled else None

    def _judge_stuck(
        self, sights: Mapping[int, Sight], since: float, policy: Policy, now: float, findings: Findings
    ) -> None:
        """All wait in an operation: one of them only seems to, or something was lost between them."""
        since = max(since, self._resumed)
        self._ask(since, policy, now, findings)
        stop_due = since + self.limits.of_stopped(policy)
        due = since + max(policy.timeout or 0.0, _STUCK_SECONDS)
        self._wake_at(now, stop_due, due)
        for slot, sight in sights.items():
            if (sight.stopped and now >= stop_due) or (sight.is_silent and now >= due):
                findings.hung[slot] = f"hung for {now - since:.0f} s, {sight.describe()}"
        if len(findings.hung) == len(sights):
            findings.hung.clear()
        findings.retry = now >= due and not findings.hung

    def _ask(self, since: float, policy: Policy, now: float, findings: Findings) -> None:
        interval = self.limits.of("training step", policy) / _ASKS
        findings.ask = now >= max(since, self._asked) + interval
        if findings.ask:
            self._asked = now
        self._wake_at(now, max(since, self._asked) + interval)

    def _limit(self, sight: Sight, policy: Policy, now: float) -> float:
        limit = self.limits.of(sight.doing, policy)
        if sight.is_silent and now >= sight.asked + _ANSWER_SECONDS:  # perhaps in code that lets no other thread run
            limit = max(limit, self.limits.of("callbacks", policy))
        return limit

    def _due(self, sight: Sight, due: float, since: float, policy: Policy, now: float) -> float:
        due = min(due, since + max(policy.stall_timeout, self._limit(sight, policy, now)))  # even if it moves
        is_asked = sight.is_silent and now < sight.asked + _ANSWER_SECONDS
        return max(due, min(sight.asked + _ANSWER_SECONDS, due + _ANSWER_SECONDS / 2)) if is_asked else due

    def _learn(self, sights: Mapping[int, Sight], late: Mapping[int, Sight], since: float, now: float) -> None:
        if self._stalled_since is None:
            for slot, (doing, start) in self._late.items():
                if slot in sights and slot not in late:
                    self.limits.observe(doing, now - start)
        self._late = {slot: (sight.doing, max(since, sight.moved)) for slot, sight in late.items()}

    def _tell_stall(
        self,
        since: float | None,
        sights: Mapping[int, Sight],
        waiting: Collection[int],
        policy: Policy,
        now: float,
        findings: Findings,
    ) -> None:
        if since is None:
            if self._stalled_since is not None:
                findings.notices.append(f"It goes on after {now - self._stalled_since:.0f} s.")
            self._stalled_since = None
            return
        if self._stalled_since is None:
            self._stalled_since, self._tell_at = since, now
        elapsed = now - self._stalled_since
        places = "; ".join(
            f"slot {slot} {'waits' if slot in waiting and not sight.stopped else sight.describe()}"
            for slot, sight in sights.items()
        )
        if elapsed >= policy.stall_timeout:
            findings.error = f"Nothing moved for {elapsed:.0f} s (`stall_timeout`): {places}."
        elif now >= self._tell_at:
            findings.notices.append(f"Nothing moves for {elapsed:.0f} s, and it is not one rank's fault: {places}.")
            self._tell_at = now + max(elapsed, _STUCK_SECONDS)
        self._wake_at(now, self._tell_at, self._stalled_since + policy.stall_timeout)

    def _wake_at(self, now: float, *times: float) -> None:
        times = tuple(time for time in times if time > now)
        self.deadline = min((*times, *(() if self.deadline is None else (self.deadline,))), default=None)
