"""Deals the batches of an epoch so that every step trains as many of them as if all slots were live; pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from lightning_ft.data.lockstep import Lockstep
from lightning_ft.data.segments import SegmentPool
from lightning_ft.data.tickets import TicketPlan

Pass = Mapping[int, int | None]
"""The ticket of each live slot in one forward and backward pass; None for a slot that only keeps the others company."""


@dataclass
class _Place:
    """How far an epoch is."""

    row: int = 0
    """The next one to be taken."""
    num_done: int = 0
    """How many rows are committed."""
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    row_of: dict[int, int] = field(default_factory=dict)
    """The row of each ticket in flight."""

    def take_in_lockstep(self, steps: Lockstep) -> None:
        """Take the rows that were taken in lockstep since this is how it was at its begin; some may be committed."""
        if steps.num_committed:
            self.num_done = self.row + steps.num_committed
        for slot, tickets in steps.in_flight.items():
            if tickets:
                self.in_flight.setdefault(slot, []).extend(tickets)
            self.row_of |= {ticket: row for row, ticket in enumerate(tickets, self.row + steps.num_committed)}
        self.row += steps.num_taken


class RowPlan:
    """Decides which slot trains which ticket where the global batch is constant.

    A *row* is what all slots train in one batch when all are live: ticket ``s`` of each row belongs to slot ``s``. While
    slots are missing, the live ones train the rest of the row in further passes of the same batch, equally many passes on
    each slot. So an epoch has the same steps with the same tickets, whoever dies or joins.

    Args:
        num_tickets: Tickets of an epoch.
        num_slots: Tickets of a row.

    Example::

        plan = RowPlan(num_tickets=6, num_slots=3)
        plan.take(live=[0, 2])  # {0: 0, 2: 2}
        plan.take_extra()  # {0: 1, 2: None}
        plan.take_extra()  # None
        plan.commit([0, 2])

    """

    def __init__(self, num_tickets: int, num_slots: int) -> None:
        self.num_tickets = num_tickets
        self.num_slots = num_slots
        self._live: tuple[int, ...] = tuple(range(num_slots))
        self._steps: Lockstep | None = None
        self._place_before_steps = _Place()
        self._extra: list[Pass] = []
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Open all tickets again."""
        self._begin(epoch, [range(self.num_tickets)])

    @property
    def in_flight(self) -> dict[int, list[int]]:
        """Tickets taken since the last commit, by slot, in the order in which they were taken."""
        return {slot: list(tickets) for slot, tickets in self._place.in_flight.items()}

    @property
    def _place(self) -> _Place:
        """Where the plan is; rows that all slots took in lockstep are entered here, before anybody looks."""
        self._enter_steps()
        return self._place_before_steps

    def _enter_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            self._place_before_steps.take_in_lockstep(steps)

    @property
    def global_batch(self) -> int | None:
        """How many consecutive tickets each step has; None where they are not consecutive, after a resumption."""
        return self.num_slots if self._is_whole else None

    def remaining_steps(self, live: Collection[int]) -> int:
        """How many further calls of :meth:`take` will yield tickets, whoever is live."""
        return self._num_rows - self.row - 1

    def upcoming(self, slot: int) -> Iterator[int]:
        """Lazily, the tickets that ``slot`` will take next if the membership stays: what its workers may prefetch."""
        under_way = [ticket for tickets in self._extra if (ticket := tickets[slot]) is not None]
        first = self._place.row
        if self._is_complete:
            return chain(under_way, chain.from_iterable(self._pool.every(self.num_slots, first * self.num_slots + slot)))
        left = (ticket for row in range(first, self._num_rows) for ticket in self._deal(row).get(slot, ()))
        return chain(under_way, left)

    @property
    def _is_complete(self) -> bool:
        """Whether all slots are live: each trains its own tickets and no others."""
        return self._live == tuple(range(self.num_slots))

    def take(self, live: Collection[int]) -> Pass:
        """Take the next row: return the tickets of its first pass, empty once nothing is open.

        :attr:`round` changes when what :meth:`upcoming` told before is no longer right.
        """
        steps = self._steps
        if steps is not None and steps.num_taken < steps.num_takes and (live is steps.live or steps.are_of(live)):
            return steps.take()
        self._follow(live)
        place = self._place
        if place.row >= self._num_rows:
            return {}
        if self._extra:  # passes that were never run: the batch was skipped
            self._extra = []
            self.round += 1
        if self._is_complete and len(self._pool) - place.row * self.num_slots >= self.num_slots:
            self._size = self.num_slots
            self._steps = steps = self._lockstep(tuple(live), place.row)
            return steps.take()
        hands = self._deal(place.row)
        self._extra = _passes(hands)
        place.row_of |= {ticket: place.row for ticket in chain.from_iterable(hands.values())}
        place.row += 1
        return self._run_pass()

    def _lockstep(self, live: tuple[int, ...], row: int) -> Lockstep:
        """All slots take their own tickets from ``row`` on, as long as rows are full."""
        first = row * self.num_slots
        hands = {slot: next(self._pool.every(self.num_slots, first + slot)) for slot in live}
        return Lockstep(live, hands, num_until_all_is_taken=self._num_rows - row)

    def take_extra(self) -> Pass | None:
        """Take the next pass of the row under way; None if there is no further one."""
        return self._run_pass() if self._extra else None

    @property
    def has_extra(self) -> bool:
        """Whether the row under way has a further pass."""
        return bool(self._extra)

    @property
    def size_of_pass(self) -> int:
        """How many tickets are trained in the pass under way."""
        return self._size

    def row_of(self, ticket: int) -> int:
        """Return the row of a ticket in flight."""
        return self._place.row_of[ticket]

    @property
    def row(self) -> int:
        """The row taken last."""
        num_taken = 0 if self._steps is None else self._steps.num_taken
        return self._place_before_steps.row + num_taken - 1

    def covers(self, members: Collection[int]) -> bool:
        """Whether ``members`` have trained everything that is in flight."""
        if self._steps is not None and self._steps.are_of(members):
            return self._place_before_steps.in_flight.keys() <= set(members)
        return self._place.in_flight.keys() <= set(members)

    def take_over(self, live: Collection[int]) -> list[Pass]:
        """Deal what slots that are not ``live`` any more have in flight, row by row.

        Returns:
            The passes, all of them in flight.

        """
        slots, in_flight = sorted(live), self._place.in_flight
        orphaned = [t for slot in sorted(in_flight.keys() - set(slots)) for t in in_flight.pop(slot)]
        passes: list[Pass] = []
        for _, tickets in groupby(sorted(orphaned, key=self.row_of), key=self.row_of):
            hands: dict[int, list[int]] = {slot: [] for slot in slots}
            self._hand_out(list(tickets), hands)
            for slot, hand in hands.items():
                in_flight.setdefault(slot, []).extend(hand)
            passes += _passes(hands)
        return passes

    def commit(self, contributors: Collection[int]) -> Mapping[int, list[int]]:
        """Mark the tickets of a committed optimizer step as done; return them by contributor."""
        steps = self._steps
        if (
            steps is not None
            and (contributors is steps.live or steps.are_of(contributors))
            and not self._place_before_steps.in_flight
        ):
            return steps.commit()
        row, in_flight = self._place.row, self._place.in_flight
        done = {slot: in_flight.get(slot, []) for slot in contributors}
        self._place_before_steps = _Place(row, num_done=row)
        self._follow(contributors)
        return done

    def remove(self, slot: int) -> None:
        """Record a death: the others train the slot's tickets from the next row on."""
        self._follow(set(self._live) - {slot})

    def add(self, slot: int) -> None:
        """Record that a new incarnation of a slot joins: it trains its own tickets from the next row on."""
        self._follow({*self._live, slot})

    def state_dict(self) -> dict[str, Any]:
        """The position as that of a :class:`TicketPlan`; rows that were not committed are open in it."""
        plan = TicketPlan(self.num_tickets, self.num_slots)
        plan.begin_with(self.epoch, self._pool.every(1, self._place.num_done * self.num_slots))
        return plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another plan was, be it of this class or a :class:`TicketPlan`."""
        plan = TicketPlan(self.num_tickets, self.num_slots)
        plan.load_state_dict(state)
        for slot in list(plan.in_flight):
            plan.remove(slot)
        self._begin(plan.epoch, plan.open_segments())

    def _begin(self, epoch: int, segments: Iterable[range]) -> None:
        self.epoch = epoch
        self.round = 0
        self._pool = SegmentPool(segments)
        first = self._pool[0] if len(self._pool) else 0
        is_rest = self._pool.segments in ([], [range(first, self.num_tickets)])
        self._is_whole = is_rest and first % self.num_slots == 0
        self._num_rows = -(-len(self._pool) // self.num_slots)
        self._steps = None
        self._place_before_steps = _Place()
        self._extra = []
        self._size = 0

    def _follow(self, live: Collection[int]) -> None:
        slots = tuple(sorted(live))
        if slots != self._live:
            self._enter_steps()
            self._live = slots
            self.round += 1

    def _deal(self, row: int) -> dict[int, list[int]]:
        """What each live slot has of a row, its own ticket first; the others' tickets go around from row to row."""
        first = row * self.num_slots
        hands: dict[int, list[int]] = {slot: [] for slot in self._live}
        others: list[int] = []
        for owner in range(min(self.num_slots, len(self._pool) - first)):
            hands.get(owner, others).append(self._pool[first + owner])
        self._hand_out(others, hands)
        return hands

    def _hand_out(self, tickets: list[int], hands: dict[int, list[int]]) -> None:
        """Give each ticket to a slot that has the fewest; not always to the same, and to the same on every rank."""
        slots = list(hands)
        start = tickets[0] // self.num_slots % len(slots) if tickets else 0  # the row's number differs in a rank that joined
        turns = slots[start:] + slots[:start]
        for ticket in tickets:
            hands[min(turns, key=lambda slot: len(hands[slot]))].append(ticket)

    def _run_pass(self) -> Pass:
        tickets, in_flight = self._extra.pop(0), self._place.in_flight
        for slot, ticket in tickets.items():
            if ticket is not None:
                in_flight.setdefault(slot, []).append(ticket)
        self._size = sum(ticket is not None for ticket in tickets.values())
        return tickets


def _passes(hands: dict[int, list[int]]) -> list[Pass]:
    count = max(map(len, hands.values()))
    return [{slot: hand[i] if i < len(hand) else None for slot, hand in hands.items()} for i in range(count)]
