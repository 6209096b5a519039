"""The live ranks, and what is to be done to them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto

from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import FromSupervisor, Raised
from lightning_ft.supervision.actions import Action, Record, Send, Signal
from lightning_ft.supervision.hangs import Sight


class Phase(Enum):
    """Where a rank is."""

    STARTING = auto()  # runs its script, between Trainer calls
    STANDING = auto()  # sent begin, which is not answered yet
    JOINING = auto()  # sets up privately
    WAITING = auto()  # may be admitted
    MEMBER = auto()
    ORPHAN = auto()  # was one, but a rank of its replica is gone


@dataclass
class Rank:
    """A live process."""

    slot: int
    incarnation: int
    pid: int
    phase: Phase = Phase.STARTING
    veteran: bool = False  # was a member: holds the job's state
    policy: Policy | None = None  # of the call before which it stands, or that it is in
    standing_at: tuple[int, str] = (-1, "")
    raised: Raised | None = None
    raised_at: float | None = None
    is_settled: bool = False  # holds the job's state; a member that is still receiving it does not
    is_over: bool = False  # its script is; what follows is the interpreter's end
    killed: bool = False
    killed_because: str | None = None  # None in a killed one: nobody needs to know
    told_join_wanted: bool = False
    shard: int = 0
    returns: bool = False  # killed only to be started again, which is not held against its slot
    sight: Sight = field(default_factory=Sight)

    @property
    def is_free(self) -> bool:
        """Whether it is on its way to become part of a new replica."""
        return self.phase in (Phase.JOINING, Phase.WAITING)


class Roster:
    """The live ranks by slot; collects actions for :meth:`take_actions`."""

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.seniority: list[int] = []  # slots of the veterans, in the order in which they became one
        self._actions: list[Action] = []

    def find(self, slot: int, incarnation: int) -> Rank | None:
        """Return the rank if it is this incarnation that lives."""
        rank = self.ranks.get(slot)
        return rank if rank is not None and rank.incarnation == incarnation else None

    def add(self, rank: Rank) -> None:
        """Add a rank that was started."""
        self.ranks[rank.slot] = rank

    def remove(self, rank: Rank) -> None:
        """Remove a rank that is gone."""
        del self.ranks[rank.slot]
        if rank.slot in self.seniority:
            self.seniority.remove(rank.slot)

    def promote(self, rank: Rank) -> None:
        """Make a rank a member."""
        rank.phase = Phase.MEMBER
        rank.told_join_wanted = False
        if not rank.veteran:
            rank.veteran = True
            self.seniority.append(rank.slot)

    def waiting(self) -> list[Rank]:
        """Return the ranks that may be admitted, by slot."""
        ranks = [self.ranks[slot] for slot in sorted(self.ranks)]
        return [rank for rank in ranks if rank.phase is Phase.WAITING and not rank.killed]

    def orphans(self) -> list[Rank]:
        """Return the orphans that may still be of use, by seniority."""
        ranks = [self.ranks[slot] for slot in self.seniority]
        return [rank for rank in ranks if rank.phase is Phase.ORPHAN and rank.raised is None and not rank.killed]

    def restart(self, rank: Rank) -> None:
        """End a rank that can't go on from where it stands, to be started again."""
        rank.returns = not rank.killed
        self.kill(rank)

    def kill(self, rank: Rank, because: str | None = None) -> None:
        """Kill a rank, once; without ``because`` its end is not a death that anybody should hear of."""
        if not rank.killed:
            rank.killed = True
            rank.killed_because = because
            self.act(Signal(rank.slot, signal.SIGKILL))

    def send(self, slot: int, message: FromSupervisor) -> None:
        """Send ``message`` to the rank in ``slot``."""
        self.act(Send(slot, message))

    def record(self, event: str, **fields: object) -> None:
        """Write one event to the log."""
        self.act(Record(event, fields))

    def act(self, action: Action) -> None:
        """Have ``action`` carried out."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """Return what is to be done, and forget it."""
        actions, self._actions = self._actions, []
        return actions
