"""The elastic engine of one machine: process groups that change under numbered operations.

A rank whose operation fails becomes a member of the next generation, where it receives the result if others completed the
operation; else all of them run it again.
"""

import atexit
import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_ft.elastic.exchange import INTERRUPT, Exchange, Interrupted, PendingExchange, pack_header
from lightning_ft.elastic.journal import Journal
from lightning_ft.elastic.leveling import ProvideState
from lightning_ft.elastic.member import Member
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import NO_SLOT, RankEnvironment
from lightning_ft.elastic.replica import ReplicaLost
from lightning_ft.errors import GroupBrokenError, ReconfigurationError, SupervisorLostError
from lightning_ft.events.log import EventLog

log = logging.getLogger(__name__)

Result = TypeVar("Result")
_of_process: "LocalEngine | None" = None

_INTERRUPTED = {"interrupted": True}  # in place of the result of the operation
_VOTED = {"voted": True}  # in place of results that every rank has by itself


class LocalEngine(Member):
    """Live membership over gloo, fed by the supervisor of this machine; its arguments are those of :class:`Member`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds_waited = 0.0
        self._calls = 0
        self.reached = 0
        """The step that was reached in this call when the last rank died which held its state."""
        self._ballot: Any = None  # this rank's own result of the operation that is voted on
        self._label = ""
        self._journal: Journal | None = None

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

    @property
    def call(self) -> int:
        return max(self._calls - 1, 0)

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
        since = time.monotonic()
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
            self.seconds_waited += time.monotonic() - since

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
        """Collective. Enter the next Trainer call: ``"start"``, ``"again"``, ``"join"`` or ``"skip"``."""
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
        if mode in ("start", "again"):
            self.reached = entered["step"]
            self._sequence, self._last = 0, None
            self.outlives_replica = False
            self.may_regroup = True  # nothing of this call has been done yet
            try:
                self._reconfigure()
            except ReplicaLost:
                self.regroup()
            self.may_regroup = False
        return mode

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
        began, size = self._sequence, self.replica.size
        self._journal, self.may_regroup = Journal(), True
        is_whole = True
        try:
            while True:
                try:
                    if not is_whole:
                        undo()
                        self.regroup()
                        if self.replica.size != size:
                            self.retire()  # whatever is alive is the replica, which holds shards of another size
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
        self._link.send({"type": "progress", "step": self._step})  # it holds the state, and with orphans it may be all

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
