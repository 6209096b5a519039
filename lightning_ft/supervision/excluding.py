"""Applies what :class:`~lightning_ft.supervision.hangs.Watch` finds: asks ranks, removes those that hang."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ft.elastic.options import Policy
from lightning_ft.supervision.actions import Ask, Notice, Show
from lightning_ft.supervision.generations import Generations
from lightning_ft.supervision.hangs import Findings, Watch
from lightning_ft.supervision.roster import Phase, Rank, Roster


class Excluding:
    """Ends ranks that keep the others waiting for too long.

    Args:
        roster: The live ranks.
        generations: Their members.

    """

    def __init__(self, roster: Roster, generations: Generations) -> None:
        self._roster = roster
        self._generations = generations
        self._watch = Watch()
        self._due: float | None = None
        self._stopped: dict[tuple[int, int], float] = {}  # those that are through with their calls, since when that is known

    def deadline(self) -> float | None:
        """Return when :meth:`settle` is to be called even if nothing happens."""
        return min((time for time in (self._watch.deadline, self._due) if time is not None), default=None)

    def start_over(self, now: float) -> None:
        """Count what a rank may keep the others waiting from now on."""
        self._watch.resume(now)

    def settle(self, candidates: Sequence[Rank], is_ending: bool, policy: Policy, now: float) -> str | None:
        """Ask and kill, as far as it is time.

        Args:
            candidates: Those who are to start the next call together, while there are no members.
            is_ending: Whether a rank's script is over: the job ends when those of the others are.
            policy: What the user asked for.
            now: The time.

        Returns:
            Why the job cannot go on, or None.

        """
        self._due = None
        self._settle_joiners(policy, now)
        members = [self._roster.ranks[slot] for slot in self._generations.members]
        if members:
            waiting, is_stuck = self._generations.waiting()
        else:
            members = [rank for rank in candidates if not rank.killed]
            standing = [rank for rank in members if rank.phase is Phase.STANDING]
            waiting, is_stuck = {rank.slot: rank.sight.moved for rank in standing}, False
            if not waiting:  # between calls, ranks may do what they like
                if is_ending:
                    self._settle_last(members, policy, now)
                members = []
        findings = self._watch.look({rank.slot: rank.sight for rank in members}, waiting, is_stuck, policy, now)
        if not any(rank.is_settled and rank.slot not in findings.hung for rank in members):
            self._spare_the_settled(findings, now)
        for slot, how in findings.hung.items():
            self._remove(self._roster.ranks[slot], how)
        for rank in members:
            if findings.ask and not rank.killed:
                self._ask(rank, now)
        if findings.retry:
            self._generations.retry("all ranks wait for each other", now)
        for notice in findings.notices:
            self._roster.act(Notice(notice))
            self._roster.record("stall", message=notice)
        return findings.error

    def _spare_the_settled(self, findings: Findings, now: float) -> None:
        """Try again instead of ending all who hold the job's state: joiners that wait for it could not go on alone."""
        spared = [slot for slot in findings.hung if self._roster.ranks[slot].is_settled]
        for slot in spared:
            del findings.hung[slot]
        if spared:
            self._generations.retry("those who hand out the state keep the ones waiting who join", now)

    def _settle_joiners(self, policy: Policy, now: float) -> None:
        """End those that take too long to get ready; nobody waits for them, but their slot stays empty."""
        limit, stop_limit = self._watch.limits.of("set-up", policy), self._watch.limits.of_stopped(policy)
        for rank in self._roster.ranks.values():
            sight = rank.sight
            is_preparing = rank.phase is Phase.JOINING or (rank.phase is Phase.STARTING and not rank.veteran)
            if not is_preparing or rank.killed or not self._generations.members:
                continue
            sight.seen(now)
            if sight.stopped or now >= sight.moved + limit:
                self._remove(rank, f"hung for {now - sight.moved:.0f} s, {sight.describe()}")
                continue
            if now >= max(sight.moved, sight.asked) + stop_limit:
                self._ask(rank, now)
            self._wake_at(min(sight.moved + limit, max(sight.moved, sight.asked) + stop_limit))

    def _settle_last(self, ranks: Sequence[Rank], policy: Policy, now: float) -> None:
        """End those that are stopped: they may take their time, but the job would not end."""
        limit = self._watch.limits.of_stopped(policy)
        for rank in ranks:
            sight, key = rank.sight, (rank.slot, rank.incarnation)
            if not sight.stopped:
                self._stopped.pop(key, None)
            elif now >= self._stopped.setdefault(key, sight.asked) + limit:
                self._remove(rank, f"hung for {now - self._stopped[key]:.0f} s, {sight.describe()}")
                continue
            if now >= max(sight.moved, sight.asked) + limit / 2:
                self._ask(rank, now)
            self._wake_at(max(sight.moved, sight.asked) + limit / 2)

    def _wake_at(self, due: float) -> None:
        self._due = min(due, self._due or due)

    def _ask(self, rank: Rank, now: float) -> None:
        rank.sight.asked = now
        self._roster.act(Ask(rank.slot))

    def _remove(self, rank: Rank, how: str) -> None:
        if rank.sight.stacks and not rank.sight.is_silent:
            self._roster.act(
                Show(rank.slot, f"What slot {rank.slot} did when the others gave up waiting for it:\n{rank.sight.stacks}")
            )
        self._roster.record("hung", slot=rank.slot, incarnation=rank.incarnation, how=how, stacks=rank.sight.stacks)
        self._roster.kill(rank, how)
        if rank.slot in self._generations.members:
            self._generations.remove(rank, how, "death")  # at once: the others have waited long enough
