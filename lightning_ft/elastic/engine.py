"""What strategies need from an elastic engine, and the engine of a process that is alone."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from lightning_ft.elastic.activity import Activity
from lightning_ft.elastic.exchange import Exchange, Interrupted, PendingExchange, pack_header
from lightning_ft.elastic.replica import Replica
from lightning_ft.elastic.replica_rows import ReplicaRows
from lightning_ft.elastic.shard_group import ShardGroup

Result = TypeVar("Result")


@dataclass(frozen=True)
class Change:
    """A membership change, as the ranks learn of it.

    Args:
        generation: Number of the new generation.
        before: Live slots before it, by rank.
        members: Live slots now, by rank.
        reason: ``"start"``, ``"death"``, ``"join"``, ``"error"``, ``"exclude"`` or ``"cancelled"``.
        dead: ``(slot, how it ended)`` of those that are gone since.
        stall: Seconds that this rank spent in the change.

    """

    generation: int
    before: tuple[int, ...]
    members: tuple[int, ...]
    reason: str
    dead: tuple[tuple[int, str], ...]
    stall: float


class Engine(Protocol):
    """Live membership of the job, and operations that survive its changes.

    An operation is numbered. It begins with an exchange of headers and ends with a result; if a rank dies in it, the
    survivors run it again among themselves, and a rank that had already completed it hands its result to the others.
    """

    slot: int
    incarnation: int
    num_slots: int
    seconds_waited: float
    """For how long this process was in operations; most of that time it waits for others."""
    on_change: Callable[[Change], None]
    activity: Activity
    may_regroup: bool
    """Whether :class:`ReplicaLost` finds somebody who knows what to do; else this process is started again, at once."""
    outlives_replica: bool
    """Whether operations of all ranks go on without a rank of this replica: nothing that they are about is sharded."""

    @property
    def replica(self) -> Replica:
        """The replica that this process is part of, or will be."""

    @property
    def shard_group(self) -> ShardGroup:
        """The process group of the replica: the same object, whatever becomes of the replica."""

    @property
    def rows(self) -> ReplicaRows | None:
        """The groups within the replica if ranks of it share batches: the same object, too."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def members(self) -> tuple[int, ...]:
        """The live slots, by rank."""

    @property
    def call(self) -> int:
        """Index of the Trainer call that this process is in."""

    @property
    def alone(self) -> bool:
        """Whether operations do not leave this process."""

    @property
    def completed(self) -> int:
        """How many operations this process completed in this call."""

    @property
    def join_wanted(self) -> bool:
        """Whether somebody waits to be admitted."""

    @property
    def hold(self) -> bool:
        """Whether too few replicas are alive to go on after the step under way."""

    def open(self, label: str, *, size: int = 0, inline: bytes = b"") -> PendingExchange:
        """Start the exchange of the next operation's headers; :meth:`run` takes it from there.

        If another operation runs first, on all ranks alike, this one is withdrawn: it costs a reconfiguration.
        """

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
        """Collective. Run the next operation, again among the survivors whenever a rank dies in it.

        Args:
            label: Names it.
            body: What it does, without collectives of the replica's group.
            size: Bytes of its data, if that is the same on all ranks.
            inline: Travels with the headers.
            opened: What :meth:`open` returned for it.
            voted: Its results differ between the ranks of a replica. Nobody completes it before all have theirs.

        Raises:
            ReplicaLost: If this rank's replica is not whole any more.

        """

    def redo(self, work: Callable[[], Result], undo: Callable[[], None]) -> Result:
        """Collective. Return what ``work`` returns; whenever this rank loses its replica in it, do it again in a new one.

        While it is done again, operations that were completed before are not run, but have the results that they had.

        Args:
            work: Calls collectives of the replica, and the same operations each time.
            undo: Called before each further time.

        """

    def regroup(self) -> None:
        """Collective. After :class:`ReplicaLost`: return once this rank is part of a replica again.

        That stands before the operation which the others are in, unless :attr:`completed` changed.
        """

    def retire(self) -> NoReturn:
        """After :class:`ReplicaLost`: have this process started again, since it can't go on from where it stands."""

    def begin_call(self, fn: str) -> str:
        """Collective. Enter the next Trainer call: ``"start"``, ``"again"``, ``"join"`` or ``"skip"``."""

    def end_call(self) -> None:
        """Collective. Leave the Trainer call."""

    def leave(self) -> None:
        """Take no further part: what this rank does from now on, it does alone, and the others need not wait for it."""

    def ask_to_stop(self, signal: int) -> None:
        """In a handler of ``signal``: if this rank waits for the supervisor now or later, have it tell the others."""

    def interrupt(self, signal: int) -> NoReturn:
        """Collective with whatever the others are in or enter next: all leave it by :class:`Interrupted`.

        Args:
            signal: The signal that asked for it; the supervisor passes it on to those that did not receive it.

        """

    def join(self) -> Any:
        """Return the state of the running job, as a new member of it; operations stay private until :meth:`enter`."""

    def enter(self) -> None:
        """Take part in the others' operations from now on."""

    def admit_joiners(self, provide_state: Callable[[Sequence[int]], Any]) -> list[int]:
        """Collective. At a step boundary: let those in that wait, give them the state, return their slots."""

    def numbered_as(self, rank: int, num_ranks: int) -> AbstractContextManager[None]:
        """While this is entered, rank and members are those of one rank of ``num_ranks``."""

    def exclude(self, slots: Collection[int], reason: str) -> None:
        """Have live slots removed."""

    def report_progress(self, step: int) -> None:
        """Say that ``step`` optimizer steps are committed."""

    def report_exception(self, error: BaseException) -> None:
        """Say that user code raised, before this process ends because of it."""

    def record(self, key: str, value: bytes) -> None:
        """Keep ``value`` for ranks that start later."""

    def recorded(self, key: str) -> bytes | None:
        """Return what an earlier rank recorded."""

    def close(self) -> None:
        """Leave the job. May be called twice."""


class SoloEngine:
    """The engine of the only process of a job: nobody can die, nobody can join."""

    slot = 0
    incarnation = 0
    num_slots = 1
    seconds_waited = 0.0
    rank = 0
    members = (0,)
    call = 0
    completed = 0
    alone = True
    join_wanted = False
    hold = False

    replica = Replica(0, 0, (0,), 1)
    rows: ReplicaRows | None = None
    may_regroup = outlives_replica = False

    def __init__(self) -> None:
        self.on_change: Callable[[Change], None] = lambda change: None
        self.activity = Activity()

    @property
    def shard_group(self) -> ShardGroup:
        raise RuntimeError("A job of one process has nothing to divide among ranks.")

    def open(self, label: str, *, size: int = 0, inline: bytes = b"") -> PendingExchange:
        return PendingExchange(None, 0, 1, pack_header(0, size, label, inline))

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
        return body((opened or self.open(label, size=size, inline=inline)).wait())

    def redo(self, work: Callable[[], Result], undo: Callable[[], None]) -> Result:
        return work()

    def regroup(self) -> None:
        raise RuntimeError("The replica of a job of one process can't be lost without it.")

    def retire(self) -> NoReturn:
        raise RuntimeError("A job of one process has nobody to start it again.")

    def begin_call(self, fn: str) -> str:
        return "start"

    def end_call(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def ask_to_stop(self, signal: int) -> None:
        pass

    def interrupt(self, signal: int) -> NoReturn:
        raise Interrupted

    def join(self) -> Any:
        raise RuntimeError("A job of one process has nobody to join.")

    def enter(self) -> None:
        pass

    def admit_joiners(self, provide_state: Callable[[Sequence[int]], Any]) -> list[int]:
        return []

    def numbered_as(self, rank: int, num_ranks: int) -> AbstractContextManager[None]:
        return nullcontext()

    def exclude(self, slots: Collection[int], reason: str) -> None:
        raise ValueError(f"`exclude({sorted(slots)})` would leave nobody: this job has one process.")

    def report_progress(self, step: int) -> None:
        pass

    def report_exception(self, error: BaseException) -> None:
        pass

    def record(self, key: str, value: bytes) -> None:
        pass

    def recorded(self, key: str) -> bytes | None:
        return None

    def close(self) -> None:
        pass
