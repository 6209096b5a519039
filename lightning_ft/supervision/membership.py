"""What becomes of the ranks: the supervisor's decisions as a pure state machine, without input, output or a clock.

Inputs (:meth:`Membership.started`, ``message``, ``exited``, ``signalled``) only change what is known.
:meth:`Membership.tick` compares what is known with what was told to the ranks and returns the difference as actions.
So the order in which simultaneous events arrive does not matter, and two deaths at once make one generation.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import Asked, Begin, Bye, Enter, Exclude, FromRank, Mode, Raised, Retire, Stop
from lightning_ft.supervision.actions import Action, Finish, Notice, Show, Signal, Spawn
from lightning_ft.supervision.excluding import Excluding
from lightning_ft.supervision.failures import Failures
from lightning_ft.supervision.generations import Generations
from lightning_ft.supervision.outcome import Ending, Outcome, describe, tell_raised
from lightning_ft.supervision.replicas import shard_for
from lightning_ft.supervision.requests import FAULTS, Request, status
from lightning_ft.supervision.respawn import Respawns
from lightning_ft.supervision.roster import Phase, Rank, Roster

_IMPATIENCE = 1.0  # seconds of grace after a second Ctrl-C
_ECHO = 0.5  # seconds within which a signal that comes again is the same one: sent to the group and to its leader
_SHARE_OF_GRACE = 0.5  # that a rank may keep the others waiting when the job is asked to stop
_LEAST_TIMEOUT = 0.1
_WENT_ON = "the others went on to the next call"
_TERMINATIONS = ("KeyboardInterrupt", "SIGTERMException")
_ENDINGS = ("RerunExit", "StreamsLostExit")  # of all ranks; they say why


class Membership:
    """The state machine.

    Args:
        num_slots: How many slots the job has.
        policy: What to do until a rank says what the user asked for.

    """

    def __init__(self, num_slots: int, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._policy_is_known = False
        self._roster = Roster()
        self._generations = Generations(self._roster)
        self._excluding = Excluding(self._roster, self._generations)
        self._incarnations = dict.fromkeys(range(num_slots), -1)
        self._wanted = set(range(num_slots))  # to be spawned
        self._suspended: set[int] = set()  # not started until somebody asks for it
        self._step = 0  # of which was last heard
        self._starting: set[int] = set()  # Spawn was returned, started was not called yet
        self._respawns = Respawns()
        self._lost: set[int] = set()  # not respawned because the call was ending; a next call wants them back
        self._outcome = Outcome()
        self._leader: int | None = None  # the slot that was rank 0 when a member completed the call
        self._call = -1
        self._fn = ""
        self._has_progressed = False
        self._begins_anew = False  # since nobody is left who held the state of the call
        self._last_raised = False  # the member that ended last
        self._failures = Failures()
        self._signal: int | None = None
        self._forwarded: dict[int, float] = {}  # signal -> when it was last passed on
        self._kill_at: float | None = None
        self._verdict: tuple[int, str | None] | None = None
        self._finished = False

    @property
    def members(self) -> list[int]:
        """Slots of the members by seniority, without those that completed the call."""
        return self._generations.members

    @property
    def call(self) -> int:
        """The newest Trainer call that was started; -1 before the first."""
        return self._call

    @property
    def num_spares(self) -> int:
        """How many processes are worth keeping ready to take a dead rank's place."""
        is_running = self._call >= 0 and self._verdict is None and self._signal is None
        return self.policy.spares if is_running else 0

    # Inputs.

    def started(self, slot: int, incarnation: int, pid: int) -> None:
        """The process that a Spawn asked for runs."""
        self._starting.discard(slot)
        rank = Rank(slot, incarnation, pid)
        self._roster.add(rank)
        self._roster.record("spawn", slot=slot, incarnation=incarnation, pid=pid)
        if self._verdict is not None:
            self._roster.kill(rank)
        elif self._signal is not None:
            self._roster.act(Signal(slot, self._signal))

    def message(self, slot: int, incarnation: int, message: FromRank, now: float) -> None:
        """A rank said something; what an earlier incarnation said is ignored."""
        rank = self._roster.find(slot, incarnation)
        if rank is None or rank.killed:
            return
        rank.sight.note(message, now)
        match message["type"]:
            case "options":
                self._on_options(rank, Policy.from_message(message))
            case "begin":
                self._on_begin(rank, message)
            case "end":
                self._end_call(rank)
            case "join" if rank.phase is Phase.JOINING and message["call"] == self._call:
                rank.phase = Phase.WAITING
            case "ready" | "at_top" | "failed" | "waiting" | "arrived":
                self._generations.note(slot, message, now)
            case "progress":
                self._has_progressed = rank.is_settled = True
                self._step = max(self._step, message["step"])
                self._failures.progressed(message["step"])
                self._generations.progressed(slot)
                self._respawns.progressed(slot)
            case "exception":
                self._on_exception(rank, message, now)
            case "asked" | "exclude" | "bye" | "retire":
                self._on_request(rank, message, now)

    def exited(self, slot: int, incarnation: int, code: int, now: float, hint: str | None = None) -> None:
        """The process of a rank is gone; ``code`` is its exit code, or ``-signum``; ``hint`` may say why."""
        rank = self._roster.find(slot, incarnation)
        if rank is None:
            return
        self._roster.remove(rank)
        how = rank.killed_because or ": ".join(part for part in (describe(code), hint) if part)
        if rank.raised is not None:
            how = tell_raised(rank.raised)
        is_member = slot in self.members
        has_lost_it = rank.phase is Phase.ORPHAN and not rank.returns
        was_member = is_member or has_lost_it or (rank.phase is Phase.MEMBER and rank.raised is not None)
        is_between_calls = rank.veteran and rank.phase not in (Phase.MEMBER, Phase.ORPHAN)
        ago = 0.0 if rank.raised_at is None else round(now - rank.raised_at, 4)
        self._roster.record("exit", slot=slot, incarnation=incarnation, how=how, code=code, member=was_member, ago=ago)
        if was_member:
            self._last_raised = rank.raised is not None and code > 0
        if is_member:
            self._generations.remove(rank, how, "death")
            self._generations.is_ending |= code == 0  # the user's own sys.exit(0) in a hook
        if rank.killed and rank.killed_because is None:
            self._return(rank)
            return
        self._account(rank, code, how, is_between_calls, now)

    def _account(self, rank: Rank, code: int, how: str, is_between_calls: bool, now: float) -> None:
        """Decide what the end of a process means for the job."""
        slot = rank.slot
        if rank.phase is Phase.ORPHAN:
            self._generations.bury(rank, how)
        if code == -signal.SIGTERM and self._verdict is None:  # it was asked to stop where it could not answer
            self._on_asked(rank, signal.SIGTERM, now)
        has_led = slot == self._leader and code < 0 and not rank.is_over
        self._outcome.add(Ending(slot, rank.incarnation, code, how, code == 0 or is_between_calls, has_led))
        if self._verdict is not None or code == 0:
            return
        if code > 0 and not self._has_progressed and self._signal is None:
            self._abort(code, f"Slot {slot} ended before the first step ({how}).", now)
        elif not is_between_calls:
            self._bury(rank, how, now)
        elif code < 0:
            self._lose(rank, how)

    def found(self, slot: int, incarnation: int, stopped: bool) -> None:
        """The kernel says whether a process is stopped."""
        rank = self._roster.find(slot, incarnation)
        if rank is not None:
            rank.sight.stopped = stopped

    def signalled(self, number: int, now: float) -> None:
        """The supervisor received a signal."""
        if now < self._forwarded.get(number, now - _ECHO) + _ECHO:
            return
        self._pass_on(number, now)
        if number == signal.SIGINT and self._signal is not None:  # Ctrl-C again: somebody waits
            self._kill_at = min(now + _IMPATIENCE, self._kill_at or now + _IMPATIENCE)
        self._heed(number, now)

    def _pass_on(self, number: int, now: float, sender: int | None = None) -> None:
        self._forwarded[number] = now
        for slot in self._roster.ranks:
            if slot != sender:
                self._roster.act(Signal(slot, number))

    def _heed(self, number: int, now: float) -> None:
        """End the job if that is what the signal means."""
        if self._signal is None and number in (signal.SIGTERM, signal.SIGINT):
            self._signal = number
            if self._verdict is None:
                self._kill_at = now + self.policy.grace
                self._excluding.start_over(now)
            self._forget_spawns()

    def asked_for(self, request: Request) -> str | None:
        """A user asks for something; return why it is refused, or None."""
        if self._verdict is not None or self._signal is not None:
            return "the job is ending"
        size, count = self.policy.shard_size, len(self._incarnations)
        refusal = request.refusal(self._roster, self.members, self._suspended, count, size)
        if refusal is not None:
            return refusal
        slot = request.slot
        assert isinstance(slot, int)
        if request.command == "resume":
            self._suspended.discard(slot)
            self._lost.discard(slot)
            if slot not in self._roster.ranks:  # else it is started when its process is gone
                self._wanted.add(slot)
        elif request.command == "fault":
            self._roster.act(Signal(slot, FAULTS[str(request.kind)]))
        else:
            if request.command == "suspend":
                self._suspended.add(slot)
            self._on_exclude([slot], "asked for" if request.command == "exclude" else "suspended")
        return None

    def status(self) -> dict[str, object]:
        """Return what is known, for people."""
        slots = status(self._roster, self.members, self._suspended, len(self._incarnations))
        return {"fn": self._fn, "step": self._step, "generation": self._generations.number, "slots": slots}

    def tick(self, now: float) -> list[Action]:
        """Return what is to be done, after any inputs or when :meth:`deadline` has come."""
        if not self._finished:
            self._settle(now)
        return self._roster.take_actions()

    def deadline(self) -> float | None:
        """Return when :meth:`tick` is to be called even if nothing happens."""
        times = [self._respawns.deadline(), self._kill_at]
        raised_at = [rank.raised_at for rank in self._roster.ranks.values() if not rank.killed]
        times += [time + self.policy.grace for time in raised_at if time is not None]
        if self._verdict is None:
            times += [self._generations.deadline(self.policy), self._excluding.deadline()]
        return min((time for time in times if time is not None), default=None)

    # Changes of what is known.

    def _on_options(self, rank: Rank, policy: Policy) -> None:
        rank.policy = policy
        if not self._policy_is_known:  # of the first call; that of a later one holds when it starts
            self.policy, self._policy_is_known = policy, True

    def _on_begin(self, rank: Rank, message: Begin) -> None:
        self._end_call(rank)  # if its last words about it were an exception that the user caught
        rank.raised = rank.raised_at = None
        rank.phase = Phase.STANDING
        rank.standing_at = (message["call"], message["fn"])

    def _end_call(self, rank: Rank) -> None:
        if rank.phase is Phase.MEMBER:
            rank.phase = Phase.STARTING
            if rank.slot in self.members:
                if not self._generations.is_ending:
                    self._leader = self.members[0]
                self._generations.complete(rank)

    def _on_exception(self, rank: Rank, message: Raised, now: float) -> None:
        is_second = rank.raised is not None  # said again by the interpreter's hook, unless handling it raised anew
        is_expected = self._verdict is not None or (self._signal is not None and message["exception"] in _TERMINATIONS)
        if not is_second:
            rank.raised, rank.raised_at = message, now
        if is_expected:
            return
        if message["exception"] in ("SIGTERMException", *_ENDINGS):  # the ranks agreed on the step
            told = f"Ends with code {message['code']}: {message['message']}."
            self._conclude(message["code"], told if message["exception"] in _ENDINGS else None, now)
            for other in self._roster.ranks.values():
                if not other.veteran:  # on its way to those who are about to end
                    self._roster.kill(other)
            return
        if self._failures.is_new(message):
            self._roster.act(Show(rank.slot, message["traceback"]))
        if not is_second and self._signal is None and message["code"] != 0:
            self._judge(rank, message, now)

    def _judge(self, rank: Rank, raised: Raised, now: float) -> None:
        """Decide whether what a rank raised is the end of the job or only of the rank."""
        told = f"Slot {rank.slot} raised {raised['exception']}"
        if not self._has_progressed:
            self._abort(raised["code"], f"{told} before the first step.", now)
        if self._verdict is not None or rank.phase is not Phase.MEMBER:
            return  # what keeps a rank from coming back is nothing to the others
        self._failures.add(rank.slot, raised)
        culprit = self._failures.used_up(rank.slot, raised, now, self.policy.restart_window)
        if self._failures.is_everywhere(raised, self.members):
            self._stop(f"{told}, and so did every other member, without a step in between.", now, raised["code"])
        elif culprit is not None:
            self._stop(f"{tell_raised(raised)} in slot {rank.slot}, as in slot {culprit} before.", now, raised["code"])
        elif rank.slot in self.members[1:]:  # rank 0 may write a last checkpoint: nobody takes its place until it is gone
            self._generations.remove(rank, tell_raised(raised), "death")

    def _on_request(self, rank: Rank, message: Asked | Exclude | Bye | Retire, now: float) -> None:
        if message["type"] == "bye":
            rank.is_over = True
        elif message["type"] == "retire":
            self._on_retire(rank)
        elif message["type"] == "asked":
            self._on_asked(rank, message["signal"], now)
        else:
            self._on_exclude(message["slots"], message["reason"])

    def _on_asked(self, rank: Rank, number: int, now: float) -> None:
        """A rank received a signal: if it alone did, it was meant for the job."""
        if number not in self._forwarded:
            self._pass_on(number, now, sender=rank.slot)
            self._heed(number, now)

    def _on_exclude(self, slots: Sequence[int], reason: str) -> None:
        how = f"excluded: {reason}"
        excluded = [rank for slot in slots if (rank := self._roster.ranks.get(slot)) is not None and not rank.killed]
        for rank in excluded:  # all of them before anybody is made an orphan, or a member again, by the end of another
            self._roster.kill(rank, how)
        for rank in excluded:
            if rank.slot in self.members:
                self._generations.remove(rank, how, "exclude")

    def _lose(self, rank: Rank, how: str) -> None:
        self._lost.add(rank.slot)
        if not rank.is_over:
            self._roster.act(Notice(f"Slot {rank.slot} (pid {rank.pid}) died ({how}) after its Trainer call."))

    def _bury(self, rank: Rank, how: str, now: float) -> None:
        """Decide whether a dead rank starts again."""
        if self._signal is not None:
            return
        if rank.killed_because == _WENT_ON:
            self._respawns.restart(rank.slot, now)
            return
        told = f"Slot {rank.slot} (pid {rank.pid}) died ({how})"
        is_over = self._generations.is_ending or not (self.members or self._begins_anew)
        if self._generations.number and is_over:
            self._lost.add(rank.slot)
            if self.members:
                self._roster.act(Notice(f"{told} as the call was ending."))
        else:
            self._roster.act(Notice(f"{told}; {self._respawn(rank.slot, now)}."))
            if rank.phase is Phase.MEMBER and rank.raised is not None and not self._respawns.has(rank.slot):
                self._failures.use_up(rank.slot, rank.raised, now)

    def _on_retire(self, rank: Rank) -> None:
        """A rank stands where it can't go on with another replica: it joins the others as one that was started again."""
        if rank.slot in self.members:
            self._generations.remove(rank, "could not go on with another replica", "death")
        self._roster.restart(rank)

    def _return(self, rank: Rank) -> None:
        """Start a rank again if it was ended for that."""
        if rank.returns and self._verdict is None and self._signal is None:
            (self._lost if self._generations.is_ending else self._wanted).add(rank.slot)

    def _respawn(self, slot: int, now: float) -> str:
        if slot in self._suspended:
            return "it stays out until somebody resumes it"
        limit = self.policy.max_restarts
        count = self._respawns.schedule(slot, now, self.policy.restart_window, limit)
        if count is None:
            self._roster.record("excluded", slot=slot, restarts=limit)
            return f"it stays out after {limit} respawn{'s' * (limit > 1)}" if limit else "it stays out"
        return f"respawning ({count} of {limit})"

    def _abort(self, code: int, error: str | None, now: float) -> None:
        """End the job: everybody is killed, except those that raised, which handle that and end by themselves."""
        self._conclude(code, error, now)
        for rank in self._roster.ranks.values():
            if rank.raised is None:
                self._roster.kill(rank)

    def _stop(self, error: str, now: float, code: int = 1) -> None:
        """End the job, giving those that hold its state the time to say why and to save it."""
        self._conclude(code, error, now)
        for rank in self._roster.ranks.values():
            if rank.veteran:
                self._roster.send(rank.slot, Stop(type="stop", message=error))
            elif rank.raised is None:
                self._roster.kill(rank)

    def _conclude(self, code: int, error: str | None, now: float) -> None:
        self._roster.record("stop", code=code, error=error)
        self._verdict = (code, error)
        self._kill_at = now + self.policy.grace
        self._forget_spawns()

    def _forget_spawns(self) -> None:
        self._wanted.clear()
        self._respawns.cancel()

    # Transitions.

    def _settle(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self._end_grace()
        for rank in self._roster.ranks.values():
            if rank.raised_at is not None and now >= rank.raised_at + self.policy.grace:
                self._roster.kill(rank, "did not end in time")
        if self._verdict is None and self._generations.number:
            self._settle_orphans(now)
        if self._verdict is None:
            self._settle_start(now)
            self._settle_members(now)
        if self._verdict is None and self._generations.number:
            self._answer_begins()
        self._spawn(now)
        if not self._roster.ranks and not self._starting and not self._respawns:
            self._finished = True
            code, error = self._verdict or self._outcome.verdict(self._signal)
            self._roster.record("finish", code=code, error=error)
            self._roster.act(Finish(code, error))

    def _policy_now(self) -> Policy:
        """A job that is asked to stop needs nobody who is away, and waits for nobody until there is no time to save."""
        if self._signal is None:
            return self.policy
        longest = max(self.policy.grace * _SHARE_OF_GRACE, _LEAST_TIMEOUT)
        return replace(self.policy, min_replicas=1, timeout=min(self.policy.timeout or longest, longest))

    def _settle_members(self, now: float) -> None:
        policy = self._policy_now()
        error = self._excluding.settle(self._candidates(), self._outcome.is_near, policy, now)
        num_expected = len(self._roster.ranks) + len(self._wanted) + len(self._starting) + len(self._respawns)
        num_expected += len(self._suspended - self._roster.ranks.keys())
        error = error or self._generations.settle(policy, num_expected, now)
        is_asked = self._signal is not None  # then the others did what they were asked, and are gone
        if self._generations.is_lost and (is_asked or self._can_begin_anew):
            self._generations.restart_orphans()
        elif self._generations.is_lost:
            error = "No replica is whole, and the ranks that are left do not hold every shard: the state is lost."
        for slot in self.members:
            self._outcome.forget(slot)  # it may have died before, but it is back
        if error is not None:
            self._stop(error, now)

    def _end_grace(self) -> None:
        self._kill_at = None
        if self._verdict is None and self._signal is not None:
            self._verdict = (128 + self._signal, None)
        for rank in self._roster.ranks.values():
            self._roster.kill(rank, "did not end in time")

    def _settle_orphans(self, now: float) -> None:
        """Once nobody is left who holds the job's state, joiners have nothing to join: all begin the call again, or end."""
        if self._roster.seniority or self._begins_anew:
            return
        if self._can_begin_anew:
            self._begin_anew(now)
            return
        self._forget_spawns()
        for rank in self._roster.ranks.values():
            self._roster.kill(rank)

    @property
    def _can_begin_anew(self) -> bool:
        """Whether ranks that are started again find what the call began with, or the state in memory or on disk."""
        return self._signal is None and not self._generations.is_ending and not self._last_raised

    def _begin_anew(self, now: float) -> None:
        self._begins_anew = True
        for slot in sorted(self._lost):
            self._respawn(slot, now)
        self._lost.clear()
        for rank in self._roster.ranks.values():
            if rank.is_free:
                self._roster.restart(rank)
        if self._roster.ranks or self._wanted or self._starting or self._respawns:
            self._roster.record("begun_anew", call=self._call, step=self._step)
            self._roster.act(Notice(f"No rank is left that holds the state after step {self._step}: all begin again."))

    def _settle_start(self, now: float) -> None:
        """Start the next call once all that take part stand before it."""
        candidates = self._candidates()
        if self.members or not candidates or any(rank.phase is not Phase.STANDING or rank.killed for rank in candidates):
            return
        calls = {rank.standing_at for rank in candidates}
        if self._begins_anew and min(calls)[0] < self._call:
            return  # on its way there
        if len(calls) > 1:
            places = ", ".join(f"{fn} (call {call})" for call, fn in sorted(calls))
            self._abort(1, f"Ranks stand at different Trainer calls: {places}. Each must make the same ones.", now)
            return
        ((self._call, self._fn),) = calls
        self.policy = next((rank.policy for rank in candidates if rank.policy is not None), self.policy)
        for rank in self._roster.ranks.values():
            if rank.phase in (Phase.JOINING, Phase.WAITING):
                self._roster.kill(rank, _WENT_ON)
        self._leader = None
        for slot in sorted(self._lost):
            self._outcome.forget(slot)  # this call has another rank 0
            self._respawn(slot, now)
        self._lost.clear()
        anew, self._begins_anew = self._begins_anew, False
        mode: Mode = "again" if anew else "start"
        self._step = self._step if anew else 0
        for rank in candidates:
            self._enter(rank, self._call, mode)
        in_place = self.policy.tensor_parallel_size > 1
        for rank in self._generations.start(candidates, self.policy.shard_size, anew=anew, in_place=in_place):
            self._roster.restart(rank)
        if not self.members:
            num_ranks = self.policy.shard_size
            told = f"{len(candidates)} alive, {num_ranks} hold a replica (`shard_size`)"
            told = f"of each {num_ranks} that are a replica together, some stay out" if in_place else told
            self._stop(f"Not enough ranks: {told}.", now)

    def _candidates(self) -> list[Rank]:
        """Return those who start the next call together."""
        if self._generations.number and not self._begins_anew:
            return [self._roster.ranks[slot] for slot in self._roster.seniority]
        if self._wanted or self._starting or self._respawns:
            return []
        return [self._roster.ranks[slot] for slot in sorted(self._roster.ranks)]

    def _answer_begins(self) -> None:
        """Send latecomers into the fit that runs, past the calls before it.

        Until there is one they wait where they are: their script would go on with a module that is not trained.
        """
        is_running = self._fn == "fit" and self.members
        is_open = (is_running or self._begins_anew) and not self._generations.is_ending
        for rank in self._roster.ranks.values():
            if rank.phase is not Phase.STANDING or rank.veteran or rank.killed or not is_open:
                continue
            call, fn = rank.standing_at
            if call < self._call:
                rank.phase = Phase.STARTING
                self._enter(rank, call, "skip")
            elif call == self._call and fn == self._fn and not self._begins_anew:
                free = [other.shard for other in self._roster.ranks.values() if other.is_free and not other.killed]
                free = [] if self.policy.tensor_parallel_size > 1 else free  # it has its place
                rank.shard = shard_for(rank.slot, free, self.policy.shard_size)
                rank.phase = Phase.JOINING
                self._enter(rank, call, "join")

    def _enter(self, rank: Rank, call: int, mode: Mode) -> None:
        size = self.policy.shard_size
        size = len(self.members) + 1 if size == "all" else size
        told = Enter(type="enter", call=call, mode=mode, shard=rank.shard, shard_size=size, step=self._step)
        self._roster.send(rank.slot, told)

    def _spawn(self, now: float) -> None:
        self._wanted.update(self._respawns.take_due(now))
        for slot in sorted(self._wanted):
            self._incarnations[slot] += 1
            self._roster.act(Spawn(slot, self._incarnations[slot]))
        self._starting |= self._wanted
        self._wanted.clear()
