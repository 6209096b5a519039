"""A process that a supervisor started: what it tells the supervisor, and what it finds in the supervisor's store."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch.distributed import Store

from lightning_ft.elastic.activity import Activity
from lightning_ft.elastic.link import SupervisorLink
from lightning_ft.elastic.local_store import LocalStore
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.elastic.raised import describe_exception
from lightning_ft.events.log import EventLog

_SUPERVISOR_SECONDS = 30.0
_PROGRESS_INTERVAL = 0.05  # seconds; the supervisor wakes up for each report
_LONGEST_UNTOLD_WAIT = 1.0


class SupervisedProcess:
    """One process of the job.

    Args:
        environment: What the supervisor told it.
        policy: What the user asked of the supervisor.
        events: Where its events are recorded.
        timeout: When a wait for other ranks ends by itself.
        on_superseded: As in :class:`SupervisorLink`.

    """

    def __init__(
        self,
        environment: RankEnvironment,
        policy: Policy,
        events: EventLog,
        timeout: timedelta,
        on_superseded: Callable[[int], None],
    ) -> None:
        self._environment = environment
        self.slot = environment.slot
        self.incarnation = environment.incarnation
        self.num_slots = environment.num_slots
        self.run_id = environment.run_id
        self.events = events
        self.activity = Activity()
        self._store = self.connect(timeout)
        self._link = SupervisorLink(environment, on_superseded, self.activity.answer)
        self._link.send({"type": "hello", "slot": self.slot, "incarnation": self.incarnation, "pid": os.getpid()})
        self.configure(policy, timeout)
        self._reported: float | None = None
        self._step = 0

    def configure(self, policy: Policy, timeout: timedelta) -> None:
        """Do as the strategy of the next call says."""
        self._timeout = timeout.total_seconds()
        self._patience = self._timeout + _SUPERVISOR_SECONDS
        self._tell_after = min(_LONGEST_UNTOLD_WAIT, (policy.timeout or self._timeout) / 4)
        self._link.send(policy.to_message())

    @property
    def join_wanted(self) -> bool:
        return self._link.join_wanted

    def ask_to_stop(self, signal: int) -> None:
        """In a handler of ``signal``: if this rank waits for the supervisor now or later, have it tell the others."""
        self._link.ask_to_stop(signal)

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
        return LocalStore(self._environment.store, timeout)
