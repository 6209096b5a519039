"""Who is a member: the supervisor's decisions as a pure state machine, without input, output or a clock.

Inputs (:meth:`Membership.started`, ``message``, ``exited``, ``signalled``) only change what is known.
:meth:`Membership.tick` compares what is known with what was told to the ranks and returns the difference as actions.
So the order in which simultaneous events arrive does not matter, and two deaths at once make one generation.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto

from lightning_ft.elastic import protocol
from lightning_ft.elastic.actions import Action, Finish, Notice, Record, Send, Show, Signal, Spawn
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.outcome import Ending, Outcome, describe
from lightning_ft.elastic.protocol import FromRank, FromSupervisor, Raised, Reason
from lightning_ft.elastic.respawn import Respawns

_MAX_ERRORS = 5
_FIRST_RETRY_DELAY = 0.05
_IMPATIENCE = 1.0  # grace after a second Ctrl-C
_TERMINATIONS = ("KeyboardInterrupt", "SIGTERMException")


class _Phase(Enum):
    STARTING = auto()  # runs its script, between Trainer calls
    STANDING = auto()  # sent begin, which is not answered yet
    JOINING = auto()  # sets up privately
    WAITING = auto()  # may be admitted
    MEMBER = auto()


@dataclass
class _Rank:
    """A live process."""

    slot: int
    incarnation: int
    pid: int
    phase: _Phase = _Phase.STARTING
    veteran: bool = False  # was a member: holds the job's state
    standing_at: tuple[int, str] = (-1, "")
    raised: Raised | None = None
    killed: bool = False
    killed_because: str | None = None  # None with ``killed``: nobody needs to know
    told_join_wanted: bool = False


@dataclass
class _Round:
    """A generation, and what its members said about it."""

    number: int = 0
    reason: Reason = "start"
    gone: bool = False
    hold: bool = False
    ready: set[int] = field(default_factory=set)
    at_top: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    first_failure: float = 0.0
    retry_at: float | None = None


class Membership:
    """The state machine.

    Args:
        num_slots: How many slots the job has.
        policy: What to do until a rank says what the user asked for.

    """

    def __init__(self, num_slots: int, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.members: list[int] = []  # by seniority; those that ended the call are not in it
        self._policy_is_known = False
        self._ranks: dict[int, _Rank] = {}
        self._incarnations = dict.fromkeys(range(num_slots), -1)
        self._seniority: list[int] = []  # members, and those between two calls
        self._wanted = set(range(num_slots))  # to be spawned
        self._starting: set[int] = set()  # Spawn was returned, started not yet called
        self._respawns = Respawns()
        self._lost: set[int] = set()  # not respawned because the call was ending; a next call wants them back
        self._outcome = Outcome()
        self._actions: list[Action] = []
        self._round = _Round()
        self._due: Reason | None = None  # a generation is to be published
        self._dead: list[protocol.Death] = []
        self._call = -1
        self._fn = ""
        self._ending = False  # a member completed the call
        self._progressed = False
        self._errors: list[str] = []  # reasons of the generations that failed since the last progress
        self._raised: dict[tuple[str, str], set[int]] = {}  # exception -> slots, since the last progress
        self._hold_since: float | None = None
        self._signal: int | None = None
        self._kill_at: float | None = None
        self._verdict: tuple[int, str | None] | None = None
        self._finished = False

    # Inputs.

    def started(self, slot: int, incarnation: int, pid: int) -> None:
        """The process that a Spawn asked for runs."""
        self._starting.discard(slot)
        self._ranks[slot] = _Rank(slot, incarnation, pid)
        self._record("spawn", slot=slot, incarnation=incarnation, pid=pid)
        if self._verdict is not None:
            self._kill(slot)
        elif self._signal is not None:
            self._actions.append(Signal(slot, self._signal))

    def message(self, slot: int, incarnation: int, message: FromRank, now: float) -> None:
        """A rank said something; what an earlier incarnation said is ignored."""
        rank = self._ranks.get(slot)
        if rank is None or rank.incarnation != incarnation or rank.killed:
            return
        if message["type"] == "options":
            if not self._policy_is_known:
                self._policy_is_known = True
                self.policy = Policy.from_message(message)
        elif message["type"] == "begin":
            self._end_call(rank)
            rank.phase = _Phase.STANDING
            rank.standing_at = (message["call"], message["fn"])
        elif message["type"] == "join":
            if rank.phase is _Phase.JOINING and message["call"] == self._call:
                rank.phase = _Phase.WAITING
        elif message["type"] == "ready":
            if message["generation"] == self._round.number:
                self._round.ready.add(slot)
        elif message["type"] == "at_top":
            if message["generation"] == self._round.number:
                self._round.at_top.add(slot)
        elif message["type"] == "failed":
            if message["generation"] == self._round.number and slot in self.members:
                if not self._round.failed:
                    self._round.first_failure = now
                self._round.failed.setdefault(slot, message["reason"])
        elif message["type"] == "progress":
            self._progressed = True
            self._errors.clear()
            self._raised.clear()
        elif message["type"] == "exception":
            self._on_exception(rank, message, now)
        elif message["type"] == "end":
            self._end_call(rank)
        elif message["type"] == "exclude":
            self._on_exclude(message["slot"], message["reason"])

    def exited(self, slot: int, incarnation: int, code: int, now: float) -> None:
        """The process of a rank is gone; ``code`` is its exit code, or ``-signum``."""
        rank = self._ranks.get(slot)
        if rank is None or rank.incarnation != incarnation:
            return
        del self._ranks[slot]
        if slot in self._seniority:
            self._seniority.remove(slot)
        how = rank.killed_because or describe(code)
        if rank.raised is not None:
            how = ": ".join(part for part in (rank.raised["exception"], rank.raised["message"]) if part)
        is_member = slot in self.members
        between_calls = rank.phase is not _Phase.MEMBER and rank.veteran
        self._record("exit", slot=slot, incarnation=incarnation, how=how, code=code, member=is_member)
        if is_member:
            self._remove(slot, rank.incarnation, how, "death")
            self._ending = self._ending or code == 0  # the user's own sys.exit(0): it will not be missed
        if rank.killed and rank.killed_because is None:
            return
        self._outcome.add(Ending(slot, incarnation, code, how, complete=code == 0 or between_calls))
        if self._verdict is not None or code == 0:
            return
        if code > 0 and not self._progressed and self._signal is None:
            self._abort(code, f"Slot {slot} ended before the first step ({how}).", now)
        elif not between_calls:
            self._bury(rank, how, now)
        elif code < 0:
            self._lost.add(slot)

    def signalled(self, number: int, now: float) -> None:
        """The supervisor received a signal."""
        self._actions += [Signal(slot, number) for slot in self._ranks]
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        kill_at = now + (self.policy.grace if self._signal is None else min(self.policy.grace, _IMPATIENCE))
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._signal = self._signal or number
        self._forget_spawns()

    def tick(self, now: float) -> list[Action]:
        """Return what is to be done, after any inputs or when :meth:`deadline` has come."""
        if not self._finished:
            self._settle(now)
        actions, self._actions = self._actions, []
        return actions

    def deadline(self) -> float | None:
        """Return when :meth:`tick` is to be called even if nothing happens."""
        times = [self._respawns.deadline(), self._kill_at]
        if self._verdict is None:
            times.append(self._round.retry_at)
            if self.policy.timeout is not None and self._silent():
                times.append(self._round.first_failure + self.policy.timeout)
            if self._hold_since is not None:
                times.append(self._hold_since + self.policy.rejoin_timeout)
        return min((time for time in times if time is not None), default=None)

    # Changes of what is known.

    def _end_call(self, rank: _Rank) -> None:
        if rank.phase is _Phase.MEMBER:
            rank.phase = _Phase.STARTING
            self._ending = True
            self.members.remove(rank.slot)
            if not self._round.gone:
                self._due = self._due or self._round.reason  # the others wait for a ready that will not come

    def _remove(self, slot: int, incarnation: int, how: str, reason: Reason) -> None:
        self.members.remove(slot)
        self._dead.append(protocol.Death(slot=slot, incarnation=incarnation, how=how))
        self._due = "death" if self._due == "death" else reason

    def _on_exception(self, rank: _Rank, message: Raised, now: float) -> None:
        rank.raised = message
        if self._verdict is not None or (self._signal is not None and message["exception"] in _TERMINATIONS):
            return
        slots = self._raised.setdefault((message["exception"], message["message"]), set())
        if not slots:
            self._actions.append(Show(rank.slot, message["traceback"]))
        slots.add(rank.slot)
        told = f"Slot {rank.slot} raised {message['exception']}"
        if self._signal is not None or message["code"] == 0:
            return
        if not self._progressed:
            self._abort(message["code"], f"{told} before the first step.", now, spare=rank.slot)
        elif len(slots) > 1 and self.members and slots.issuperset(self.members):
            error = f"{told}, and so did every other member, without a step in between."
            self._abort(message["code"], error, now, spare=rank.slot)

    def _on_exclude(self, slot: int, reason: str) -> None:
        rank = self._ranks.get(slot)
        if rank is None or rank.killed:
            return
        self._kill(slot, f"excluded: {reason}")
        if slot in self.members:
            self._remove(slot, rank.incarnation, f"excluded: {reason}", "exclude")

    def _bury(self, rank: _Rank, how: str, now: float) -> None:
        """Decide whether a dead rank starts again."""
        if self._signal is not None:
            return
        if self._round.number and (self._ending or not self.members):
            self._lost.add(rank.slot)
            if self.members:
                self._actions.append(Notice(f"Slot {rank.slot} (pid {rank.pid}) died ({how}) as the call was ending."))
            return
        consequence = self._respawn(rank.slot, now)
        self._actions.append(Notice(f"Slot {rank.slot} (pid {rank.pid}) died ({how}); {consequence}."))

    def _respawn(self, slot: int, now: float) -> str:
        limit = self.policy.max_restarts
        count = self._respawns.schedule(slot, now, self.policy.restart_window, limit)
        if count is None:
            self._record("excluded", slot=slot, restarts=limit)
            return f"it stays out after {limit} respawns" if limit else "it stays out"
        return f"respawning ({count} of {limit})"

    def _abort(self, code: int, error: str | None, now: float, spare: int | None = None) -> None:
        """End the job: everybody is killed, except ``spare``, which is about to end by itself."""
        self._record("abort", code=code, error=error)
        self._verdict = (code, error)
        self._kill_at = now + self.policy.grace
        self._forget_spawns()
        for slot in self._ranks:
            if slot != spare:
                self._kill(slot)

    def _stop(self, error: str, now: float) -> None:
        """End the job, giving ranks the time to say why."""
        self._record("stop", error=error)
        self._verdict = (1, error)
        self._kill_at = now + self.policy.grace
        self._forget_spawns()
        for slot in self._ranks:
            self._send(slot, protocol.Stop(type="stop", message=error))

    def _forget_spawns(self) -> None:
        self._wanted.clear()
        self._respawns.cancel()

    def _kill(self, slot: int, because: str | None = None) -> None:
        rank = self._ranks[slot]
        if not rank.killed:
            rank.killed = True
            rank.killed_because = because
            self._actions.append(Signal(slot, signal.SIGKILL))

    # Transitions.

    def _settle(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            if self._verdict is None and self._signal is not None:
                self._verdict = (128 + self._signal, None)
            for slot in self._ranks:
                self._kill(slot, "did not end in time")
        if self._round.number and not any(rank.veteran for rank in self._ranks.values()):
            self._forget_spawns()  # nobody is left who holds the job's state: joiners have nothing to join
            for slot in self._ranks:
                self._kill(slot)
        if self._verdict is None:
            self._settle_start(now)
            self._settle_failures(now)
        if self._verdict is None:
            self._settle_top()
            self._publish(now)
            self._settle_hold(now)
        if self._verdict is None:
            self._answer_begins()
            self._tell_members()
        self._wanted.update(self._respawns.take_due(now))
        for slot in sorted(self._wanted):
            self._incarnations[slot] += 1
            self._actions.append(Spawn(slot, self._incarnations[slot]))
        self._starting |= self._wanted
        self._wanted.clear()
        if not self._ranks and not self._starting and not self._respawns:
            self._finished = True
            code, error = self._verdict or self._outcome.verdict(self._signal)
            self._record("finish", code=code, error=error)
            self._actions.append(Finish(code, error))

    def _settle_start(self, now: float) -> None:
        """Start the next call once all that take part stand before it."""
        first = self._round.number == 0
        if self.members or (first and (self._wanted or self._starting or self._respawns)):
            return
        order = sorted(self._ranks) if first else list(self._seniority)
        candidates = [self._ranks[slot] for slot in order]
        if not candidates or any(rank.phase is not _Phase.STANDING for rank in candidates):
            return
        calls = {rank.standing_at for rank in candidates}
        if len(calls) > 1:
            places = ", ".join(f"{fn} (call {call})" for call, fn in sorted(calls))
            self._abort(1, f"Ranks stand at different Trainer calls: {places}. Each must make the same ones.", now)
            return
        ((self._call, self._fn),) = calls
        self._ending = False
        self._errors.clear()
        for rank in self._ranks.values():
            if rank.phase in (_Phase.JOINING, _Phase.WAITING):
                self._kill(rank.slot, "the others went on to the next call")
        for slot in sorted(self._lost):
            self._respawn(slot, now)
        self._lost.clear()
        self._due = "start"
        for rank in candidates:
            self._send(rank.slot, protocol.Enter(type="enter", call=self._call, mode="start"))
            self._admit(rank)

    def _settle_failures(self, now: float) -> None:
        """Try again when every member failed; remove those that hang while others failed."""
        current = self._round
        if self._due is not None or not current.failed or not self.members:
            return
        silent = self._silent()
        if silent:
            if self.policy.timeout is not None and now >= current.first_failure + self.policy.timeout:
                for slot in silent:
                    self._kill(slot, f"hung for {self.policy.timeout:g} s")
            return
        if current.retry_at is None:
            self._errors.append(next(iter(current.failed.values())))
            count = len(self._errors)
            if count > _MAX_ERRORS:
                self._stop(f"{count} generations failed in a row, without a step in between: {self._errors[0]}", now)
                return
            current.retry_at = now + (_FIRST_RETRY_DELAY * 2 ** (count - 2) if count > 1 else 0.0)
        if now >= current.retry_at:
            self._due = "error"

    def _silent(self) -> list[int]:
        """Members that did not report the failure that others reported."""
        failed = self._round.failed
        return [slot for slot in self.members if slot not in failed and not self._ranks[slot].killed] if failed else []

    def _settle_top(self) -> None:
        """Admit joiners, or call the wait off, once all members wait at the same step boundary."""
        current = self._round
        if self._due is not None or not current.gone or not self.members or not current.at_top.issuperset(self.members):
            return
        waiting = self._waiting()
        if len(self.members) + len(waiting) < self.policy.min_replicas and not self._ending:
            return
        for rank in waiting:
            self._admit(rank)
        self._due = "join" if waiting else "cancelled"

    def _waiting(self) -> list[_Rank]:
        ranks = [] if self._ending else [self._ranks[slot] for slot in sorted(self._ranks)]
        return [rank for rank in ranks if rank.phase is _Phase.WAITING and not rank.killed]

    def _admit(self, rank: _Rank) -> None:
        rank.phase = _Phase.MEMBER
        rank.veteran = True
        rank.told_join_wanted = False
        self.members.append(rank.slot)
        if rank.slot not in self._seniority:
            self._seniority.append(rank.slot)
        self._outcome.forget(rank.slot)

    def _publish(self, now: float) -> None:
        if self._due is None:
            return
        reason, self._due = self._due, None
        dead, self._dead = self._dead, []
        if not self.members:
            return
        hold = len(self.members) < self.policy.min_replicas and not self._ending
        self._round = _Round(self._round.number + 1, reason, hold=hold)
        if not hold:
            self._hold_since = None
        elif self._hold_since is None:
            self._hold_since = now
        message = protocol.Generation(
            type="generation",
            number=self._round.number,
            members=list(self.members),
            incarnations={slot: self._ranks[slot].incarnation for slot in self.members},
            reason=reason,
            dead=dead,
            hold=hold,
        )
        self._record("generation", **{name: value for name, value in message.items() if name != "type"})
        for slot in self.members:
            self._send(slot, message)

    def _settle_hold(self, now: float) -> None:
        """Stop when too few members stay too few."""
        if self._hold_since is None:
            return
        if self._ending or not self.members:
            self._hold_since = None
            return
        needed = self.policy.min_replicas
        alive = len(self.members)
        possible = len(self._ranks) + len(self._starting) + len(self._respawns)
        waited = now - self._hold_since
        if possible < needed:
            self._stop(
                f"Only {alive} ranks are alive, {needed} are needed, and none of the others may start again.", now
            )
        elif waited >= self.policy.rejoin_timeout:
            self._stop(f"Only {alive} ranks are alive, {needed} are needed, and none came back in {waited:.0f} s.", now)

    def _answer_begins(self) -> None:
        """Send latecomers past the calls that they missed, or into the one that runs."""
        if not self._round.number:
            return
        for rank in self._ranks.values():
            call, fn = rank.standing_at
            if rank.phase is not _Phase.STANDING or rank.veteran or rank.killed:
                continue
            if call < self._call:
                rank.phase = _Phase.STARTING
                self._send(rank.slot, protocol.Enter(type="enter", call=call, mode="skip"))
            elif call == self._call and fn == self._fn == "fit" and self.members and not self._ending:
                rank.phase = _Phase.JOINING
                self._send(rank.slot, protocol.Enter(type="enter", call=call, mode="join"))

    def _tell_members(self) -> None:
        """Send the go, and whether somebody waits to join."""
        current = self._round
        if self.members and not current.gone and current.ready.issuperset(self.members):
            current.gone = True
            for slot in self.members:
                self._send(slot, protocol.Go(type="go", generation=current.number))
        wanted = bool(self._waiting())
        for slot in self.members:
            rank = self._ranks[slot]
            if rank.told_join_wanted != wanted:
                rank.told_join_wanted = wanted
                self._send(slot, protocol.JoinWanted(type="join_wanted", value=wanted))

    def _send(self, slot: int, message: FromSupervisor) -> None:
        self._actions.append(Send(slot, message))

    def _record(self, event: str, **fields: object) -> None:
        self._actions.append(Record(event, fields))
