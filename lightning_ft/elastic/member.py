"""A member of generations: how a rank follows the changes of membership that the supervisor publishes.

All members of a generation say "ready", then get "go", connect, and tell each other how many operations they completed. A
rank that is one behind receives the result of the one it missed; a rank that joins receives the training state.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from lightning_ft.elastic.engine import Change
from lightning_ft.elastic.exchange import PendingExchange
from lightning_ft.elastic.groups import GlooGroups, Group, Groups
from lightning_ft.elastic.leveling import LeftBehind, Leveling, Outcome, ProvideState, Standing
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import FromRank, Generation, RankEnvironment
from lightning_ft.elastic.replica import Replica, ReplicaLost
from lightning_ft.elastic.replica_groups import ReplicaGroups
from lightning_ft.elastic.replica_rows import ReplicaRows
from lightning_ft.elastic.shard_group import ShardGroup
from lightning_ft.elastic.supervised import SupervisedProcess
from lightning_ft.elastic.vigil import Vigil, VigilOfReplica
from lightning_ft.errors import ExcludedError, GroupBrokenError
from lightning_ft.events.log import EventLog


class Member(SupervisedProcess):
    """A process with the groups of the generation that it is in.

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
        self.on_change: Callable[[Change], None] = lambda change: None
        self.alone = True
        self.may_regroup = self.outlives_replica = False
        self._groups = groups or GlooGroups(environment.store)
        waits = VigilOfReplica(timeout.total_seconds(), lambda: self._vigil, self._follow)
        slot, num_slots = environment.slot, environment.num_slots
        self._replicas = ReplicaGroups(self._groups, slot, num_slots, waits, self._lose_replica)
        super().__init__(environment, policy, events, timeout, self._interrupt)
        self._group: Group | None = None
        self._generation = -1
        self._vigil = self._make_vigil(self._generation)
        self._members: tuple[int, ...] = ()
        self._hold = False
        self._numbered: tuple[int, int] | None = None
        self._dead: dict[int, str] = {}  # since the last change that this rank took part in
        self._sequence = 0  # of the next operation
        self._last: Any = None  # the result of the one before
        self._is_running = False  # inside of an operation
        self._opened: PendingExchange | None = None  # an operation whose headers travel while this rank computes

    @property
    def replica(self) -> Replica:
        return self._replicas.replica

    @property
    def shard_group(self) -> ShardGroup:
        return self._replicas.shard_group

    @property
    def rows(self) -> ReplicaRows | None:
        return self._replicas.rows

    def configure(self, policy: Policy, timeout: timedelta) -> None:
        self._replicas.row_size = policy.tensor_parallel_size
        super().configure(policy, timeout)

    @property
    def rank(self) -> int:
        return self._live_rank if self._numbered is None else self._numbered[0]

    @property
    def _live_rank(self) -> int:
        # Not 0 before admission: whoever believes that it is rank 0 writes logs and checkpoints.
        return self._members.index(self.slot) if self.slot in self._members else self.num_slots - 1

    @property
    def members(self) -> tuple[int, ...]:
        return self._members if self._numbered is None else tuple(range(self._numbered[1]))

    @property
    def generation(self) -> int:
        """Number of the current generation; -1 before the first."""
        return self._generation

    @property
    def completed(self) -> int:
        return self._sequence

    @property
    def hold(self) -> bool:
        return self._hold

    @contextmanager
    def numbered_as(self, rank: int, num_ranks: int) -> Iterator[None]:
        """While this is entered, rank and members are those of one rank of ``num_ranks``.

        For what a rank computes from them and must be computed again alike in its next incarnation, or in another rank that
        takes it over: its part of a stream.
        """
        self._numbered = rank, num_ranks
        try:
            yield
        finally:
            self._numbered = None

    def exclude(self, slots: Collection[int], reason: str) -> None:
        """Have live slots removed."""
        if not slots or not set(slots) <= set(self._members):
            raise ValueError(f"`exclude({sorted(slots)})`: expected live slots, of {list(self._members)}.")
        self._link.send({"type": "exclude", "slots": sorted(slots), "reason": reason})

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
                if isinstance(error, LeftBehind) and error.is_this_one:
                    self.retire()
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
