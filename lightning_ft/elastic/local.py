"""The elastic engine of one machine: process groups that change under numbered operations.

A supervisor publishes generations of the membership. All members of one say "ready", then get "go", connect, and tell
each other how many operations they completed. A rank that is one behind receives the result of the one it missed; a rank
that joins receives the training state from a survivor. Then everybody goes on.
"""

import atexit
import ctypes
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from lightning_ft.elastic._torch_compat import connect_store
from lightning_ft.elastic.activity import Activity
from lightning_ft.elastic.engine import Change
from lightning_ft.elastic.exchange import INTERRUPT, Exchange, Interrupted, PendingExchange, pack_header
from lightning_ft.elastic.groups import GlooGroups, Group, Groups
from lightning_ft.elastic.journal import Journal
from lightning_ft.elastic.leveling import Leveling, Outcome, ProvideState, Standing
from lightning_ft.elastic.link import SupervisorLink
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import NO_SLOT, FromRank, Generation, RankEnvironment
from lightning_ft.elastic.raised import describe_exception
from lightning_ft.elastic.replica import Replica, ReplicaLost
from lightning_ft.elastic.replica_groups import ReplicaGroups
from lightning_ft.elastic.shard_group import ShardGroup
from lightning_ft.elastic.vigil import Vigil, VigilOfReplica
from lightning_ft.errors import (
    ExcludedError,
    GroupBrokenError,
    ReconfigurationError,
    SupervisorLostError,
)
from lightning_ft.events.log import EventLog

log = logging.getLogger(__name__)

Result = TypeVar("Result")
_of_process: "LocalEngine | None" = None

_SUPERVISOR_SECONDS = 30.0
_INTERRUPTED = {"interrupted": True}  # in place of the result of the operation
_VOTED = {"voted": True}  # in place of results that every rank has by itself
_PROGRESS_INTERVAL = 0.05  # seconds; the supervisor wakes up for each report
_LONGEST_UNTOLD_WAIT = 1.0


class LocalEngine:
    """Live membership over gloo, fed by the supervisor of this machine.

    Args:
        environment: What the supervisor told this rank.
        policy: What the user asked of the supervisor.
        events: Where membership changes are recorded.
        timeout: When a wait for other ranks ends by itself; the supervisor is to end whoever is waited for before.
        groups: Makes the process groups; gloo over loopback by default.

    """

    def __init__(
        self,
        environment: RankEnvironment,
        policy: Policy,
        events: EventLog,
        timeout: timedelta,
        groups: Groups | None = None,
    ) -> None:
        self._environment = environment
        self.slot = environment.slot
        self.incarnation = environment.incarnation
        self.num_slots = environment.num_slots
        self.run_id = environment.run_id
        self.on_change: Callable[[Change], None] = lambda change: None
        self.alone = True
        self.may_regroup = self.outlives_replica = False
        self.events = events
        host, port = environment.store_host, environment.store_port
        self._groups = groups or GlooGroups(host, port)
        self._store = connect_store(host, port, timeout)
        self.activity = Activity()
        waits = VigilOfReplica(timeout.total_seconds(), lambda: self._vigil, self._follow)
        self._replicas = ReplicaGroups(self._groups, self.slot, self.num_slots, waits, self._lose_replica)
        self._link = SupervisorLink(environment, self._interrupt, self.activity.answer)
        self._link.send({"type": "hello", "slot": self.slot, "incarnation": self.incarnation, "pid": os.getpid()})
        self.configure(policy, timeout)
        self._group: Group | None = None
        self._generation = -1
        self._vigil = self._make_vigil(self._generation)
        self._members: tuple[int, ...] = ()
        self._hold = False
        self._by_slot = False
        self._calls = 0
        self._opened: PendingExchange | None = None  # an operation whose headers travel while this rank computes
        self._sequence = 0
        self._last: Any = None
        self._ballot: Any = None  # this rank's own result of the operation that is voted on
        self._is_running = False  # inside of an operation
        self._label = ""
        self._journal: Journal | None = None
        self._dead: dict[int, str] = {}  # since the last change that this rank took part in
        self._reported: float | None = None
        self._step = 0

    @classmethod
    def of_process(cls, environment: RankEnvironment, policy: Policy, timeout: timedelta) -> "LocalEngine":
        """Return the one engine of this process, shared by all Trainers of the user's script."""
        global _of_process
        if _of_process is None:
            _of_process = cls(environment, policy, EventLog(environment.slot, environment.incarnation), timeout)
            if environment.slot != NO_SLOT:
                _of_process.events.emit("start", pid=os.getpid())
            atexit.register(_of_process.close)
            os.register_at_fork(after_in_child=_of_process.disown)
        else:
            _of_process.configure(policy, timeout)
        return _of_process

    def configure(self, policy: Policy, timeout: timedelta) -> None:
        """Do as the strategy of the next call says."""
        self._timeout = timeout.total_seconds()
        self._patience = self._timeout + _SUPERVISOR_SECONDS
        self._tell_after = min(_LONGEST_UNTOLD_WAIT, (policy.timeout or self._timeout) / 4)
        self._link.send(policy.to_message())

    @property
    def replica(self) -> Replica:
        return self._replicas.replica

    @property
    def shard_group(self) -> ShardGroup:
        return self._replicas.shard_group

    @property
    def rank(self) -> int:
        return self.slot if self._by_slot else self._live_rank

    @property
    def _live_rank(self) -> int:
        # Not 0 before admission: whoever believes that it is rank 0 writes logs and checkpoints.
        return self._members.index(self.slot) if self.slot in self._members else self.num_slots - 1

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self.num_slots)) if self._by_slot else self._members

    @property
    def call(self) -> int:
        return max(self._calls - 1, 0)

    @property
    def generation(self) -> int:
        """Number of the current generation; -1 before the first."""
        return self._generation

    @property
    def completed(self) -> int:
        return self._sequence

    @property
    def join_wanted(self) -> bool:
        return self._link.join_wanted

    @property
    def hold(self) -> bool:
        return self._hold

    # Operations.

    def open(self, label: str, *, size: int = 0, inline: bytes = b"") -> PendingExchange:
        is_over = self._journal is not None and self._journal.is_behind  # it will not be run
        group = None if self.alone or is_over else self._group
        header = pack_header(self._sequence, size, label, inline)
        rank, count = (0, 1) if self.alone else (self._live_rank, len(self._members))
        replicate, num_replicas = (None, 1) if self.alone else (self._replicas.replicate, self.replica.count)
        self._opened = PendingExchange(group, rank, count, header, replicate, num_replicas)
        return self._opened

    def run(
        self,
        label: str,
        body: Callable[[Exchange], Result],
        *,
        size: int = 0,
        inline: bytes = b"",
        opened: PendingExchange | None = None,
        voted: bool = False,
    ) -> Result:
        """Collective. Run the next operation, again among the survivors whenever a rank dies in it."""
        if self._journal is not None and self._journal.is_behind:
            return cast(Result, self._read_journal(label))
        if self._opened is not None and self._opened is not opened:
            self._withdraw(label)
        if opened is not None and opened.withdrawn:
            opened = None
        self._is_running, self._label = True, label
        try:
            if not voted or self.alone or self.replica.size == 1:
                result = self._run(label, body, size, inline, opened)
            else:
                self._run(label, self._voted(body), size, inline, opened)
                result = self._ballot
            if self._journal is not None:
                self._journal.write(label, result)
            return result
        finally:
            self._is_running = False
            self._opened = None

    def _read_journal(self, label: str) -> Any:
        """Return the result of an operation that was completed before."""
        assert self._journal is not None
        self._opened = None
        known, result = self._journal.read()
        if known != label:
            log.warning("A step that was begun again called %s, where it had called %s before.", label, known)
            self.retire()
        return result

    def _voted(self, body: Callable[[Exchange], Result]) -> Callable[[Exchange], Any]:
        """Let ``body`` end when all ranks have their results: whoever fails in that has its own in hand."""

        def voted(exchange: Exchange) -> dict[str, bool]:
            self._ballot = body(exchange)
            exchange.all_reduce(torch.zeros(1))
            return _VOTED

        return voted

    def _withdraw(self, label: str) -> None:
        """Take back what was opened: ``label`` comes first. Nothing else can: what was sent can't be unsent."""
        assert self._opened is not None
        self._opened.withdrawn, self._opened = True, None
        if not self.alone:
            self._recover(label, "called while another operation was opened, which comes after it")

    def _run(
        self, label: str, body: Callable[[Exchange], Result], size: int, inline: bytes, opened: PendingExchange | None
    ) -> Result:
        if self.alone:
            return body((opened or self.open(label, size=size, inline=inline)).wait())
        reason = ""
        while True:
            try:
                result = body((opened or self.open(label, size=size, inline=inline)).wait())
                break
            except Interrupted:
                self._complete(_INTERRUPTED)
                raise
            except GroupBrokenError as error:
                if error.__cause__ is not None and str(error) == reason:
                    raise error.__cause__ from None  # not the connections' fault: their errors tell other addresses
                reason = str(error)
            opened = None
            replay = self._recover(label, reason)
            if replay is not None:
                (result,) = replay
                if result == _INTERRUPTED:
                    self._complete(result)
                    raise Interrupted
                break
        self._complete(result)
        return result

    def _complete(self, result: Any) -> None:
        self._sequence += 1
        self._last = result

    def _recover(self, label: str, error: str) -> tuple[Any] | None:
        reason = f"{label}: {error}"[:300]
        self.events.emit("operation_failed", operation=label, sequence=self._sequence, error=error[:200])
        number = self._generation
        self._break_off()  # closing our sockets is what unblocks the peers that wait for us
        self._link.send({"type": "failed", "generation": number, "reason": reason})
        if self.outlives_replica:
            self._replicas.lose()
        return self._reconfigure(regrouping=self.outlives_replica)[1].replay

    # Calls of the Trainer.

    def begin_call(self, fn: Any) -> str:
        """Collective. Enter the next Trainer call: ``"start"``, ``"join"`` or ``"skip"``."""
        call, self._calls = self._calls, self._calls + 1
        self.activity.begin_call()
        if self.slot == NO_SLOT and not self._take_slot(call):
            return "skip"
        self._link.send({"type": "begin", "call": call, "fn": fn})
        entered = self._link.wait_for_enter(call)
        mode = entered["mode"]
        self.alone = True
        if mode == "join":
            self._replicas.prepare(self.slot, entered["shard"], entered["shard_size"])
        if mode == "start":
            self._sequence, self._last = 0, None
            self.outlives_replica = False
            self.may_regroup = True  # nothing of this call has been done yet
            try:
                self._reconfigure()
            except ReplicaLost:
                self.regroup()
            self.may_regroup = False
        return mode

    def _take_slot(self, call: int) -> bool:
        """Wait as a spare until a slot is free; return False if the others are past ``call`` before that."""
        self._link.send({"type": "park", "call": call})
        assigned = self._link.wait_for_slot(call)
        if assigned is None:
            return False
        self.slot, self.incarnation = self.events.slot, self.events.incarnation = assigned["slot"], assigned["incarnation"]
        os.environ.update(replace(self._environment, slot=self.slot, incarnation=self.incarnation).to_environ())
        self.events.emit("start", pid=os.getpid())
        return True

    def end_call(self) -> None:
        """Collective. Leave the Trainer call."""
        self.run("end of call", lambda exchange: None)
        self._link.use(None)
        self._link.send({"type": "end", "call": self.call})
        self.activity.begin_call()
        self.alone = True  # the group stays open: peers may still be reading what this rank sent last

    def leave(self) -> None:
        """Take no further part: what this rank does from now on, it does alone, and the others need not wait for it."""
        self._break_off()
        self._replicas.lose()
        self._opened = None
        self.alone = True

    def redo(self, work: Callable[[], Result], undo: Callable[[], None]) -> Result:
        """Collective. Return what ``work`` returns; whenever this rank loses its replica in it, do it again in a new one."""
        if self.alone or self.replica.size == 1 or self.may_regroup:  # then somebody else knows what to do
            return work()
        began = self._sequence
        self._journal, self.may_regroup = Journal(), True
        is_whole = True
        try:
            while True:
                try:
                    if not is_whole:
                        undo()
                        self.regroup()
                        self._check_place(began)
                        self._journal.rewind()
                        is_whole = True
                    return work()
                except ReplicaLost:
                    is_whole = False
        finally:
            self._journal, self.may_regroup = None, False

    def _check_place(self, began: int) -> None:
        """Collective in the replica. Go on only if all of it are in the same piece of work, and their shards of one step."""
        place = torch.tensor([began, -began])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.shard_group)
        if place[0] != -place[1]:
            self.retire()

    def regroup(self) -> None:
        """Collective. After ReplicaLost: return once this rank is part of a replica again."""
        self.events.emit("orphaned", sequence=self._sequence)
        self._withdraw_opened()
        self._replicas.lose()  # the others of it may not know yet
        number = self._generation
        self._break_off()
        self._link.send({"type": "failed", "generation": number, "reason": "its replica is not whole"})
        _, outcome = self._reconfigure(regrouping=True)
        if outcome.replay is None:
            return
        (result,) = outcome.replay
        self._complete(result)
        if result == _INTERRUPTED:
            raise Interrupted
        if self._journal is not None:
            self._journal.write(self._label, self._ballot if result == _VOTED else result)

    def _lose_replica(self) -> NoReturn:
        if not self.may_regroup:
            self.retire()
        raise ReplicaLost

    def retire(self) -> NoReturn:
        """After ReplicaLost: have this process started again, since it can't go on from where it stands."""
        self.events.emit("retired", sequence=self._sequence)
        self._break_off()
        self._replicas.lose()
        self._link.send({"type": "retire"})
        while True:
            signal.pause()

    def ask_to_stop(self, signal: int) -> None:
        """In a handler of ``signal``: if this rank waits for the supervisor now or later, have it tell the others."""
        self._link.ask_to_stop(signal)

    def interrupt(self, signal: int) -> NoReturn:
        """Collective with whatever the others are in or enter next: all leave it by :class:`Interrupted`."""
        self._link.send({"type": "asked", "signal": signal})
        self.run(INTERRUPT, lambda exchange: None)
        raise AssertionError("an interruption interrupts at least this rank")

    def join(self) -> Any:
        """Return the state of the running job, as a new member of it; operations stay private until :meth:`enter`."""
        self.events.emit("join_requested")
        self._link.send({"type": "join", "call": self.call})
        _, outcome = self._reconfigure(joining=True)
        if outcome.state is None:
            reason = "every rank that held the state of the training died before it was handed over"
            raise ReconfigurationError(self._generation, 1, reason)
        return outcome.state[0]

    def enter(self) -> None:
        """Take part in the others' operations from now on."""
        self.alone = False

    def admit_joiners(self, provide_state: ProvideState) -> list[int]:
        """Collective. At a step boundary: let those in that wait, give them the state, return their slots."""
        if self.alone:
            return []
        while True:
            self._link.send({"type": "at_top", "generation": self._generation})
            reason, outcome = self._reconfigure(at_top=True, provide_state=provide_state)
            if outcome.replay is not None:
                outcome.joined = outcome.replay[0]["joined"]
            if outcome.joined is not None or reason == "cancelled":
                break
            # Somebody died while everybody waited here: the joiners still wait.
        joined = outcome.joined or []
        self._complete({"joined": joined})
        return joined

    @contextmanager
    def numbered_by_slot(self) -> Iterator[None]:
        """While this is entered, rank and members are what they are if everybody lives.

        For what a rank computes from them and must compute again alike in its next incarnation: its part of a stream.
        """
        self._by_slot = True
        try:
            yield
        finally:
            self._by_slot = False

    def exclude(self, slot: int, reason: str) -> None:
        """Have a live slot removed."""
        if slot not in self._members:
            raise ValueError(f"`exclude({slot})`: expected a live slot, one of {list(self._members)}.")
        self._link.send({"type": "exclude", "slot": slot, "reason": reason})

    # Reconfiguration.

    def _follow(self) -> bool:
        """While this rank waits for the others of its replica: take part in a change of membership, if there is one."""
        newer = self._link.newer_than(self._generation)
        if newer is None:
            return False
        if self._is_running:
            raise GroupBrokenError("A newer generation came.")
        if not self._replicas.lives_in(newer):
            self._lose_replica()
        self._withdraw_opened()
        self._break_off()
        _, outcome = self._reconfigure()
        assert outcome.replay is None, "an operation was completed without this rank"
        return True

    def _withdraw_opened(self) -> None:
        if self._opened is not None:
            self._opened.withdrawn, self._opened = True, None

    def _reconfigure(
        self,
        *,
        joining: bool = False,
        at_top: bool = False,
        regrouping: bool = False,
        provide_state: ProvideState | None = None,
    ) -> tuple[str, Outcome]:
        """Return why there is a new generation, and what this rank brought out of it."""
        started = time.monotonic()
        before = self._members
        while True:
            generation = self._next_generation(joining, regrouping)
            is_whole = self._replicas.lives_in(generation) or generation["reason"] == ("join" if at_top else "start")
            if self.slot not in generation["members"] or not (joining or regrouping or is_whole):
                self._generation = generation["number"] - 1  # it is for the one who regroups
                self._lose_replica()
            number, members = generation["number"], tuple(generation["members"])
            self._vigil = self._make_vigil(number)
            try:
                self._group = self._connect(generation)
                if self._group is None:
                    continue
                shards = [shard for replica in generation["replicas"] for shard in range(len(replica))]
                leveling = Leveling(self._group, members, members.index(self.slot), shards, self.events, self._vigil)
                with self.activity.during("hand-over") if joining or at_top else nullcontext():
                    outcome = leveling.run(Standing(self._sequence, joining, at_top), self._last, provide_state)
                break
            except GroupBrokenError as error:
                self.events.emit("generation_failed", generation=number, error=str(error)[:200])
                self._break_off()
                self._link.send({"type": "failed", "generation": number, "reason": f"reconfiguration: {error}"[:300]})
        if joining:
            self._sequence, self._last = outcome.sequence, {"joined": outcome.joined}
        self._members, self._hold, self.alone = members, generation["hold"], joining
        stall = time.monotonic() - started
        dead, self._dead = tuple(sorted(self._dead.items())), {}
        self._tell(Change(number, before, members, generation["reason"], dead, stall), outcome)
        return generation["reason"], outcome

    def _tell(self, change: Change, outcome: Outcome) -> None:
        self.events.emit(
            "generation",
            generation=change.generation,
            members=list(change.members),
            reason=change.reason,
            dead=[list(death) for death in change.dead],
            joined=outcome.joined or [],
            sequence=self._sequence,
            replayed=outcome.replay is not None,
            stall_ms=round(1e3 * change.stall, 2),
        )
        self.on_change(change)

    def _next_generation(self, joining: bool, regrouping: bool) -> Generation:
        while True:
            # A joiner may wait through hours of validation; a member only as long as its peers may compute.
            what = f"the supervisor to publish a generation after {self._generation}"
            patience = None if joining or regrouping else self._patience
            generation = self._link.wait_for_generation(self._generation, patience, what)
            self._break_off()
            self._generation = generation["number"]
            self._dead |= {death["slot"]: death["how"] for death in generation["dead"]}
            if self.slot in generation["members"] or (self.slot in generation["orphans"] and not regrouping):
                return generation
            if self.slot not in generation["orphans"] and not joining:
                raise ExcludedError(self.slot, f"it is not in generation {generation['number']}")

    def _connect(self, generation: Generation) -> Group | None:
        """Return the group of ``generation``, or None if a newer one superseded it."""
        number, members = generation["number"], generation["members"]
        self._link.send({"type": "ready", "generation": number})
        if not self._link.wait_for_go(number, self._patience) or not self._link.use(number):
            return None
        group = self._groups.create(members.index(self.slot), len(members), self._vigil)
        try:
            self._replicas.connect(generation, self.slot, group, self._vigil)
        except RuntimeError:
            self._groups.retire(group)
            raise
        return group

    def _make_vigil(self, number: int) -> Vigil:
        return Vigil(number, partial(self._is_over, number), self._tell_supervisor, self._tell_after, self._timeout)

    def _is_over(self, number: int) -> bool:
        return self._link.is_over(number)

    def _tell_supervisor(self, message: FromRank) -> None:
        self._link.send(message)

    def _interrupt(self, number: int) -> None:
        """Make whatever waits in generation ``number`` raise; called on the link's thread when there is a newer one."""
        self._groups.interrupt(number)
        newest = self._link.newer_than(number)
        if newest is not None and not self._replicas.lives_in(newest):
            self._replicas.interrupt()

    def _break_off(self) -> None:
        self._link.use(None)
        self._replicas.break_off()
        if self._group is not None:
            self._groups.interrupt(self._generation)
            self._groups.retire(self._group)
            self._group = None

    # Reports and records.

    def report_progress(self, step: int) -> None:
        """Say that ``step`` optimizer steps are committed."""
        self._step = step
        self.activity.stepped()
        now = time.monotonic()
        if self._reported is None or now - self._reported >= _PROGRESS_INTERVAL:
            self._reported = now
            self._link.send({"type": "progress", "step": step})

    def report_exception(self, error: BaseException) -> None:
        """Say that user code raised, before this process ends because of it."""
        code = error.code if isinstance(error, SystemExit) else 1
        code = code if isinstance(code, int) else int(code is not None)
        self._link.send(describe_exception(error, code, self._step))

    def report_log(self, directory: str) -> None:
        """Tell the supervisor where event logs go."""
        self._link.send({"type": "log", "directory": directory})

    def record(self, key: str, value: bytes) -> None:
        """Keep ``value`` for ranks that start later."""
        self._store.set(f"record/{key}", value)  # type: ignore[arg-type]

    def recorded(self, key: str) -> bytes | None:
        """Return what an earlier rank recorded."""
        return self._store.get(f"record/{key}") if self._store.check([f"record/{key}"]) else None

    def live(self) -> dict[int, int]:
        """Return who lives by what the supervisor said last, slots with their incarnation; for any thread."""
        return self._link.live()

    def connect(self, timeout: timedelta) -> Store:
        """Return a connection of its own to the supervisor's store: whoever waits in one keeps its other users waiting."""
        return connect_store(self._environment.store_host, self._environment.store_port, timeout)

    def close(self) -> None:
        """Leave the job. May be called twice."""
        with suppress(SupervisorLostError):
            self._link.send({"type": "bye"})
        self._link.close()
        self._replicas.lose()
        self._groups.close()
        self._group = None

    def disown(self) -> None:
        """Leave the job to the parent, in a process that was forked from this one.

        There, groups lack their threads: whoever drops one waits for these forever, and so does a garbage collection that
        comes upon one.
        """
        gc.freeze()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        atexit.unregister(self.close)  # it would shut down connections of the parent
