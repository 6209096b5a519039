"""The members of the running call, and the generations that tell them of each other: pure, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import Arrived, AtTop, Death, Failed, Generation, Go, JoinWanted, Ready, Reason, Waiting
from lightning_ft.supervision.replicas import Replicas, ShardSize, form
from lightning_ft.supervision.roster import Phase, Rank, Roster

_MAX_ERRORS = 5
_FIRST_RETRY_DELAY = 0.05


@dataclass
class _Round:
    """A generation, and what its members said about it."""

    number: int = 0
    reason: Reason = "start"
    gone: bool = False
    ready: dict[int, float] = field(default_factory=dict)  # slot -> since when
    at_top: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)  # in an operation
    failed: dict[int, str] = field(default_factory=dict)
    first_failure: float = 0.0
    retry_at: float | None = None


class Generations:
    """Publishes a generation whenever the members change, or all of them failed.

    Args:
        roster: The live ranks.

    """

    def __init__(self, roster: Roster) -> None:
        self._replicas = Replicas()  # of the members
        self._shard_size: ShardSize = 1
        self._in_place = False
        self.is_ending = False  # a member completed the call: nobody can join any more
        self._roster = roster
        self._round = _Round()
        self._due: Reason | None = None
        self._dead: list[Death] = []
        self._errors: list[str] = []  # why generations failed, since the last progress
        self._hold_since: float | None = None

    @property
    def members(self) -> list[int]:
        """Their slots, replica by replica, by seniority, without those that completed the call."""
        return self._replicas.slots

    @property
    def number(self) -> int:
        """The newest generation; 0 before the first one."""
        return self._round.number

    def start(self, ranks: list[Rank], shard_size: ShardSize, *, anew: bool = False, in_place: bool = False) -> list[Rank]:
        """Begin a call with ``ranks`` as its members; return those that are too many for whole replicas."""
        self.is_ending = False
        self._shard_size, self._in_place = shard_size, in_place
        self._replicas.start([rank.slot for rank in ranks], shard_size, anew=anew, in_place=in_place)
        self._errors.clear()
        self._dead.clear()
        self._due = "start"
        members = set(self.members)
        for replica in self._replicas.all:
            self._admit([self._roster.ranks[slot] for slot in replica], is_settled=True)
        return [rank for rank in ranks if rank.slot not in members]

    def remove(self, rank: Rank, how: str, reason: Reason) -> None:
        """Take a member out that is gone or about to be killed, and its replica with it."""
        if self.is_ending:
            self._replicas.discard(rank.slot)
        else:
            for mate in map(self._roster.ranks.__getitem__, self._replicas.dissolve(rank.slot)):
                mate.phase = Phase.ORPHAN
                if not mate.is_settled:  # it has no state yet
                    self._roster.restart(mate)
            self._regroup()
        self.bury(rank, how)
        self._due = "death" if self._due == "death" else reason

    def bury(self, rank: Rank, how: str) -> None:
        """Have the members told that a rank is gone."""
        self._dead.append(Death(slot=rank.slot, incarnation=rank.incarnation, how=how))

    def _regroup(self) -> None:
        """Make replicas of orphans: they are in the same step as the members, and may well complete it with these."""
        for replica in self._form(self._roster.orphans()):
            self._replicas.add(replica, self._shard_size)
            self._admit([self._roster.ranks[slot] for slot in replica], is_settled=True)

    def complete(self, rank: Rank) -> None:
        """Take a member out that completed the call; the others only hear of it if they wait for it."""
        self.is_ending = True
        self._replicas.discard(rank.slot)
        self.restart_orphans()
        if not self._round.gone:
            self._due = self._due or self._round.reason

    def note(self, slot: int, message: Ready | AtTop | Failed | Waiting | Arrived, now: float) -> None:
        """Note what a member said about a generation; news of an older one is none."""
        current = self._round
        if message["generation"] != current.number or slot not in self.members:
            return
        match message["type"]:
            case "ready":
                current.ready[slot] = now
            case "at_top":
                current.at_top[slot] = now
            case "waiting":
                current.waiting[slot] = now - message["seconds"]
            case "arrived":
                current.waiting.pop(slot, None)
            case "failed":
                self._note_failure(slot, message["reason"], now)

    def _note_failure(self, slot: int, reason: str, now: float) -> None:
        current = self._round
        if not current.failed:
            current.first_failure = now
        current.failed.setdefault(slot, reason)
        current.waiting.pop(slot, None)

    def retry(self, reason: str, now: float) -> None:
        """Have what all members are in tried again."""
        for slot in self.members:
            self._note_failure(slot, reason, now)

    def waiting(self) -> tuple[dict[int, float], bool]:
        """Return which members wait for the others and since when, and whether in an operation, not for an answer."""
        current = self._round
        waiting = dict.fromkeys(current.failed, current.first_failure) | current.waiting
        waiting |= current.at_top if current.gone else current.ready
        return {slot: since for slot, since in waiting.items() if slot in self.members}, bool(current.waiting)

    def progressed(self, slot: int) -> None:
        """Note that a rank committed a step: what failed before was no lasting error."""
        self._errors.clear()
        if slot in self.members and self._round.gone and self._due is None:
            self.restart_orphans()

    def restart_orphans(self) -> None:
        """Once the members are past the step in which an orphan stands, it has nothing that anybody needs."""
        for rank in self._roster.orphans():
            self._roster.restart(rank)

    @property
    def is_lost(self) -> bool:
        """Whether there are orphans left, but not every shard of the state."""
        return not self.is_ending and not self.members and bool(self._roster.orphans())

    def settle(self, policy: Policy, num_expected: int, now: float) -> str | None:
        """Publish, admit, retry and tell, as far as what is known asks for it.

        Args:
            policy: What the user asked for.
            num_expected: Ranks that are alive or may still come.
            now: The time.

        Returns:
            Why the members cannot go on, or None.

        """
        error = self._settle_failures(now)
        if error is not None:
            return error
        self._settle_top(policy)
        self._publish(policy, now)
        error = self._settle_hold(policy, num_expected, now)
        if error is not None:
            return error
        self._tell()
        return None

    def deadline(self, policy: Policy) -> float | None:
        """Return when :meth:`settle` is to be called even if nothing happens."""
        current = self._round
        times = [current.retry_at]
        if self._hold_since is not None:
            times.append(self._hold_since + policy.rejoin_timeout)
        return min((time for time in times if time is not None), default=None)

    def _admit(self, replica: list[Rank], is_settled: bool) -> None:
        for shard, rank in enumerate(replica):
            rank.shard, rank.is_settled = shard, rank.is_settled or is_settled
            self._roster.promote(rank)

    def _joining(self) -> list[list[int]]:
        """Return the replicas that ranks make up which wait to be admitted."""
        return [] if self.is_ending else self._form(self._roster.waiting())

    def _form(self, free: list[Rank]) -> list[list[int]]:
        return form({rank.slot: rank.shard for rank in free}, self._shard_size, in_place=self._in_place)

    def _settle_failures(self, now: float) -> str | None:
        """Try again when every member failed."""
        current = self._round
        if self._due is not None or not self.members:
            return None
        if not current.failed.keys() >= set(self.members):
            return None
        if current.retry_at is None:
            self._errors.append(next(iter(current.failed.values())))
            count = len(self._errors)
            if count > _MAX_ERRORS:
                return f"{count} generations failed in a row, without a step in between: {self._errors[0]}"
            current.retry_at = now + (_FIRST_RETRY_DELAY * 2 ** (count - 2) if count > 1 else 0.0)
        if now >= current.retry_at:
            self._due = "error"
        return None

    def _settle_top(self, policy: Policy) -> None:
        """Admit joiners, or call the wait off, once all members wait at the same step boundary."""
        current = self._round
        if self._due is not None or not current.gone or not self.members or not current.at_top.keys() >= set(self.members):
            return
        self.restart_orphans()  # of a validation before it, and perhaps those that the members wait for here
        joining = self._joining()
        if len(self._replicas.all) + len(joining) < policy.min_replicas and not self.is_ending:
            return
        for replica in joining:
            self._replicas.add(replica, self._shard_size)
            self._admit([self._roster.ranks[slot] for slot in replica], is_settled=False)
        self._due = "join" if joining else "cancelled"

    def _publish(self, policy: Policy, now: float) -> None:
        if self._due is None:
            return
        reason, self._due = self._due, None
        dead, self._dead = self._dead, []
        if not self.members:
            return
        hold = len(self._replicas.all) < policy.min_replicas and not self.is_ending
        self._hold_since = (now if self._hold_since is None else self._hold_since) if hold else None
        self._round = _Round(self._round.number + 1, reason)
        message = Generation(
            type="generation",
            number=self._round.number,
            members=list(self.members),
            replicas=[list(replica) for replica in self._replicas.all],
            orphans=[rank.slot for rank in self._roster.orphans()],
            ending=self.is_ending,
            incarnations={slot: self._roster.ranks[slot].incarnation for slot in self.members},
            reason=reason,
            dead=dead,
            hold=hold,
        )
        self._roster.record("generation", **{name: value for name, value in message.items() if name != "type"})
        for slot in (*self.members, *message["orphans"]):
            self._roster.send(slot, message)
            self._roster.ranks[slot].sight.moved = now  # it has something new to do

    def _settle_hold(self, policy: Policy, num_expected: int, now: float) -> str | None:
        """Give up when too few members stay too few."""
        if self.is_ending or not self.members:
            self._hold_since = None
        if self._hold_since is None:
            return None
        told = f"Not enough replicas: {len(self._replicas.all)} alive, {policy.min_replicas} needed (`min_replicas`)"
        if num_expected // (1 if self._shard_size == "all" else self._shard_size) < policy.min_replicas:
            return f"{told}, and the others may not start again."
        if now >= self._hold_since + policy.rejoin_timeout:  # as the deadline is computed, to the last bit
            return f"{told}, and too few came back in {now - self._hold_since:.0f} s."
        return None

    def _tell(self) -> None:
        """Send the go, and whether somebody waits to join."""
        current = self._round
        if self.members and not current.gone and current.ready.keys() >= set(self.members):
            current.gone = True
            for slot in self.members:
                self._roster.send(slot, Go(type="go", generation=current.number))
        wanted = not self.is_ending and bool(self._joining())
        for slot in self.members:
            rank = self._roster.ranks[slot]
            if rank.told_join_wanted != wanted:
                rank.told_join_wanted = wanted
                self._roster.send(slot, JoinWanted(type="join_wanted", value=wanted))
