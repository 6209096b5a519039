"""The members of the running call, and the generations that tell them of each other: pure, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import AtTop, Death, Failed, Generation, Go, JoinWanted, Ready, Reason
from lightning_ft.supervision.roster import Rank, Roster

_MAX_ERRORS = 5
_FIRST_RETRY_DELAY = 0.05


@dataclass
class _Round:
    """A generation, and what its members said about it."""

    number: int = 0
    reason: Reason = "start"
    gone: bool = False
    ready: set[int] = field(default_factory=set)
    at_top: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    first_failure: float = 0.0
    first_ready: float = 0.0
    first_at_top: float = 0.0
    retry_at: float | None = None


class Generations:
    """Publishes a generation whenever the members change, or all of them failed.

    Args:
        roster: The live ranks.

    """

    def __init__(self, roster: Roster) -> None:
        self.members: list[int] = []  # by seniority, without those that completed the call
        self.is_ending = False  # a member completed the call: nobody can join any more
        self._roster = roster
        self._round = _Round()
        self._due: Reason | None = None
        self._dead: list[Death] = []
        self._errors: list[str] = []  # why generations failed, since the last progress
        self._hold_since: float | None = None

    @property
    def number(self) -> int:
        """The newest generation; 0 before the first one."""
        return self._round.number

    def start(self, ranks: list[Rank]) -> None:
        """Begin a call with ``ranks`` as its members."""
        self.is_ending = False
        self._errors.clear()
        self._dead.clear()
        self._due = "start"
        for rank in ranks:
            self._admit(rank)

    def remove(self, rank: Rank, how: str, reason: Reason) -> None:
        """Take a member out that is gone or about to be killed."""
        self.members.remove(rank.slot)
        self._dead.append(Death(slot=rank.slot, incarnation=rank.incarnation, how=how))
        self._due = "death" if self._due == "death" else reason

    def complete(self, rank: Rank) -> None:
        """Take a member out that completed the call; the others only hear of it if they wait for it."""
        self.is_ending = True
        self.members.remove(rank.slot)
        if not self._round.gone:
            self._due = self._due or self._round.reason

    def note(self, slot: int, message: Ready | AtTop | Failed, now: float) -> None:
        """Note what a member said about a generation; news of an older one is none."""
        current = self._round
        if message["generation"] != current.number or slot not in self.members:
            return
        if message["type"] == "ready":
            if not current.ready:
                current.first_ready = now
            current.ready.add(slot)
        elif message["type"] == "at_top":
            if not current.at_top:
                current.first_at_top = now
            current.at_top.add(slot)
        else:
            if not current.failed:
                current.first_failure = now
            current.failed.setdefault(slot, message["reason"])

    def progressed(self) -> None:
        """Note that steps are committed: what failed before was no lasting error."""
        self._errors.clear()

    def settle(self, policy: Policy, num_expected: int, now: float) -> str | None:
        """Publish, admit, retry and tell, as far as what is known asks for it.

        Args:
            policy: What the user asked for.
            num_expected: Ranks that are alive or may still come.
            now: The time.

        Returns:
            Why the members cannot go on, or None.

        """
        error = self._settle_failures(policy, now)
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
        since, silent = self._silent()
        if policy.timeout is not None and silent:
            times.append(since + policy.timeout)
        if self._hold_since is not None:
            times.append(self._hold_since + policy.rejoin_timeout)
        return min((time for time in times if time is not None), default=None)

    def _admit(self, rank: Rank) -> None:
        self._roster.promote(rank)
        self.members.append(rank.slot)

    def _silent(self) -> tuple[float, list[Rank]]:
        """Return the members that the others wait for, and since when."""
        current = self._round
        if current.failed:
            since, heard = current.first_failure, set(current.failed)
        elif not current.gone and current.ready:
            since, heard = current.first_ready, current.ready
        elif current.at_top:
            since, heard = current.first_at_top, current.at_top
        else:
            return 0.0, []
        return since, [self._roster.ranks[slot] for slot in self.members if slot not in heard]

    def _settle_failures(self, policy: Policy, now: float) -> str | None:
        """Try again when every member failed; remove those that hang while others failed."""
        current = self._round
        if self._due is not None or not self.members:
            return None
        since, silent = self._silent()
        if policy.timeout is not None and silent and now >= since + policy.timeout:
            for rank in silent:
                how = f"hung for {policy.timeout:g} s"
                self._roster.kill(rank, how)
                self.remove(rank, how, "death")  # at once: the others have waited long enough
            return None
        if not current.failed or silent:
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
        if self._due is not None or not current.gone or not self.members or not current.at_top >= set(self.members):
            return
        waiting = [] if self.is_ending else self._roster.waiting()
        if len(self.members) + len(waiting) < policy.min_replicas and not self.is_ending:
            return
        for rank in waiting:
            self._admit(rank)
        self._due = "join" if waiting else "cancelled"

    def _publish(self, policy: Policy, now: float) -> None:
        if self._due is None:
            return
        reason, self._due = self._due, None
        dead, self._dead = self._dead, []
        if not self.members:
            return
        hold = len(self.members) < policy.min_replicas and not self.is_ending
        self._hold_since = (now if self._hold_since is None else self._hold_since) if hold else None
        self._round = _Round(self._round.number + 1, reason)
        message = Generation(
            type="generation",
            number=self._round.number,
            members=list(self.members),
            incarnations={slot: self._roster.ranks[slot].incarnation for slot in self.members},
            reason=reason,
            dead=dead,
            hold=hold,
        )
        self._roster.record("generation", **{name: value for name, value in message.items() if name != "type"})
        for slot in self.members:
            self._roster.send(slot, message)

    def _settle_hold(self, policy: Policy, num_expected: int, now: float) -> str | None:
        """Give up when too few members stay too few."""
        if self.is_ending or not self.members:
            self._hold_since = None
        if self._hold_since is None:
            return None
        waited = now - self._hold_since
        told = f"Not enough ranks: {len(self.members)} alive, {policy.min_replicas} needed (`min_replicas`)"
        if num_expected < policy.min_replicas:
            return f"{told}, and the others may not start again."
        if waited >= policy.rejoin_timeout:
            return f"{told}, and too few came back in {waited:.0f} s."
        return None

    def _tell(self) -> None:
        """Send the go, and whether somebody waits to join."""
        current = self._round
        if self.members and not current.gone and current.ready >= set(self.members):
            current.gone = True
            for slot in self.members:
                self._roster.send(slot, Go(type="go", generation=current.number))
        wanted = not self.is_ending and bool(self._roster.waiting())
        for slot in self.members:
            rank = self._roster.ranks[slot]
            if rank.told_join_wanted != wanted:
                rank.told_join_wanted = wanted
                self._roster.send(slot, JoinWanted(type="join_wanted", value=wanted))
