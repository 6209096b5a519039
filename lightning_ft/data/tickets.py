"""Deals the batches of an epoch over slots that may come and go; pure, and the same on every rank."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from lightning_ft.data.segments import SegmentPool, from_runs, from_triples, merge_segments, to_runs, to_triples

_STATE_VERSION = 1


class TicketPlan:
    """Decides which slot trains which ticket (a batch of the epoch's global order) and knows which are still open.

    In round 0 slot ``s`` of ``R`` owns tickets ``s``, ``s + R``, ..., so that it can prefetch without asking anybody.
    When the shortest stream of a live slot is used up while others still hold tickets, a new round deals out whatever
    is open. Every rank makes the same calls in the same order and therefore holds the same plan; nothing is
    communicated.

    A ticket is *open*, then *in flight* on the slot that took it, then done once its optimizer step was committed. If
    its slot dies in between, it is open again.

    Args:
        num_tickets: Tickets of an epoch.
        num_slots: Slots that round 0 of an epoch is dealt to; others may join later.

    Raises:
        ValueError: If there is no slot, or a negative number of tickets.

    Example::

        plan = TicketPlan(num_tickets=5, num_slots=2)
        while tickets := plan.take(live=[0, 1]):  # {0: 0, 1: 1}, {0: 2, 1: 3}, {0: 4, 1: None}
            train(tickets)
            plan.commit([0, 1])

    """

    def __init__(self, num_tickets: int, num_slots: int) -> None:
        if num_tickets < 0 or num_slots < 1:
            raise ValueError(
                f"`TicketPlan(num_tickets={num_tickets}, num_slots={num_slots})` is not valid: expected at least "
                "0 tickets and at least 1 slot."
            )
        self.num_tickets = num_tickets
        self.num_slots = num_slots
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Open all tickets again and deal round 0."""
        self.epoch = epoch
        self.round = 0
        self._num_open = self.num_tickets
        self._in_flight: dict[int, list[int]] = {}
        self._returned: list[int] = []
        self._start_round([range(self.num_tickets)], range(self.num_slots))

    def begin_with(self, epoch: int, segments: Iterable[range]) -> None:
        """Deal round 0 of an epoch in which only the tickets in ``segments`` are open."""
        self.begin_epoch(epoch)
        self._start_round(segments, range(self.num_slots))
        self._num_open = len(self._pool)

    @property
    def num_open(self) -> int:
        """How many tickets are neither done nor in flight."""
        return self._num_open

    @property
    def in_flight(self) -> dict[int, list[int]]:
        """Tickets taken since the last commit, by slot, in the order in which they were taken."""
        return {slot: list(tickets) for slot, tickets in self._in_flight.items()}

    def open_tickets(self) -> Iterator[int]:
        """Lazily, all tickets that are neither done nor in flight, as a new round would deal them."""
        return chain.from_iterable(self._open_segments())

    def open_segments(self) -> list[range]:
        """All tickets that are neither done nor in flight, in the order of the round."""
        if not self._returned and len(set(self._taken)) == 1:  # nobody is ahead of the others
            return list(self._pool.every(1, self._taken[0] * len(self._taken)))
        return merge_segments(range(ticket, ticket + 1) for ticket in sorted(self.open_tickets()))

    def remaining_steps(self, live: Collection[int]) -> int:
        """How many further calls of :meth:`take` will yield tickets if ``live`` does not change."""
        slots = _check_live(live)
        orphaned = sum(len(tickets) for slot, tickets in self._in_flight.items() if slot not in slots)
        return -(-(self._num_open + orphaned) // len(slots))

    def upcoming(self, slot: int) -> Iterator[int]:
        """Lazily, the tickets that ``slot`` will take next if no new round begins: what its workers may prefetch."""
        owner = self._owners.get(slot)
        return chain.from_iterable(()) if owner is None else chain.from_iterable(self._segments_left(owner))

    def take(self, live: Collection[int]) -> dict[int, int | None]:
        """Take the next micro-batch on every live slot.

        :attr:`round` changes when this begins a new round: then what :meth:`upcoming` told before is no longer right.

        Args:
            live: All live slots, the same on every rank. What other slots have in flight is open again.

        Returns:
            The ticket of each live slot, in the order of ``live``; ``None`` for a slot that gets none, which takes part
            in the step with weight 0. Empty once nothing is open.

        Raises:
            ValueError: If ``live`` is empty or names a slot twice.

        """
        slots = _check_live(live)
        for slot in sorted(self._in_flight.keys() - slots):
            self.remove(slot)
        if not self._num_open:
            return {}
        if self._needs_new_round(live):
            self._in_flight_of_round.clear()  # they stay in flight, but their positions belong to the old round
            segments = merge_segments(self._open_segments())
            self._returned = []
            self.round += 1
            self._start_round(segments, sorted(live))
        return {slot: self._take_one(slot) for slot in live}

    def commit(self, contributors: Collection[int]) -> dict[int, list[int]]:
        """Mark the tickets of a committed optimizer step as done.

        Tickets in flight on other slots are not in that step. They are dealt again in the next round, not at the slot's
        own position: should the slot be alive, its workers are already past them.

        Args:
            contributors: Slots whose gradients are in the step.

        Returns:
            The tickets done, by contributor.

        """
        done = {slot: self._in_flight.pop(slot, []) for slot in contributors}
        for _, tickets in sorted(self._in_flight.items()):
            self._returned += tickets
            self._num_open += len(tickets)
        self._in_flight.clear()
        self._in_flight_of_round.clear()
        return done

    def reopen(self, tickets: Collection[int]) -> None:
        """Take back that tickets are done: the step that had them is not applied as it was."""
        self._returned += tickets
        self._num_open += len(tickets)

    def remove(self, slot: int) -> None:
        """Record a death: what the slot has in flight is open again, and its next incarnation begins there."""
        tickets = self._in_flight.pop(slot, [])
        num_of_round = self._in_flight_of_round.pop(slot, 0)
        if num_of_round:
            self._taken[self._owners[slot]] -= num_of_round
        self._returned += tickets[: len(tickets) - num_of_round]
        self._num_open += len(tickets)

    def add(self, slot: int) -> None:
        """Record that a new incarnation of a slot joins.

        It continues the slot's stream of this round. If there is none, the next :meth:`take` that includes it begins a
        new round, unless that would not save a step.
        """
        self.remove(slot)  # in case nobody recorded the death of the incarnation before

    def state_dict(self) -> dict[str, Any]:
        """The plan as plain data; small whatever the number of tickets."""
        owners = list(self._owners)
        old = {slot: tickets[: len(tickets) - self._num_of_round(slot)] for slot, tickets in self._in_flight.items()}
        return {
            "version": _STATE_VERSION,
            "num_tickets": self.num_tickets,
            "epoch": self.epoch,
            "round": self.round,
            "num_open": self._num_open,
            "pool": to_triples(self._pool.segments),
            "owners": to_triples(merge_segments(range(slot, slot + 1) for slot in owners)),
            "taken": max(self._taken),
            "behind": to_runs(max(self._taken) - taken for taken in self._taken),
            "in_flight": to_runs(map(self._num_of_round, owners)),
            "in_flight_of_older_rounds": [[slot, tickets] for slot, tickets in old.items() if tickets],
            "returned": to_triples(merge_segments(range(ticket, ticket + 1) for ticket in self._returned)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where another plan was.

        That plan may have had another number of slots: streams of slots that are not live any more are dealt out in a
        later round, and the next epoch is dealt to this plan's own slots.

        Raises:
            ValueError: If the state belongs to another number of tickets or to another version of this class.

        """
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"`TicketPlan` state of version {state['version']} cannot be read: expected {_STATE_VERSION}.")
        if state["num_tickets"] != self.num_tickets:
            raise ValueError(
                f"`TicketPlan` state is of an epoch of {state['num_tickets']} batches, but this one has "
                f"{self.num_tickets}. Resume with the same dataset and batch size."
            )
        self.epoch = state["epoch"]
        self.round = state["round"]
        self._num_open = state["num_open"]
        self._returned = list(chain.from_iterable(from_triples(state["returned"])))
        self._start_round(from_triples(state["pool"]), list(chain.from_iterable(from_triples(state["owners"]))))
        self._taken = [int(state["taken"]) - behind for behind in from_runs(state["behind"])]
        self._in_flight = {slot: list(tickets) for slot, tickets in state["in_flight_of_older_rounds"]}
        for (slot, owner), count in zip(self._owners.items(), from_runs(state["in_flight"]), strict=True):
            if count:
                taken = self._taken[owner]
                tickets = [self._pool[owner + n * len(self._owners)] for n in range(taken - count, taken)]
                self._in_flight.setdefault(slot, []).extend(tickets)
                self._in_flight_of_round[slot] = count

    def _start_round(self, segments: Iterable[range], slots: Sequence[int]) -> None:
        self._pool = SegmentPool(segments)
        self._owners = {slot: index for index, slot in enumerate(slots)}
        self._taken = [0] * len(slots)
        self._in_flight_of_round: dict[int, int] = {}

    def _needs_new_round(self, live: Collection[int]) -> bool:
        """Whether a stream is used up and dealing again reaches more tickets or saves a step.

        Without the second half the uneven last step of every epoch would cost each rank a restart of its workers.
        """
        left = [self._num_left(slot) for slot in live]
        return min(left) == 0 and (sum(left) < self._num_open or max(left) > -(-self._num_open // len(left)))

    def _take_one(self, slot: int) -> int | None:
        if not self._num_left(slot):
            return None
        owner = self._owners[slot]
        ticket = self._pool[owner + self._taken[owner] * len(self._owners)]
        self._taken[owner] += 1
        self._num_open -= 1
        self._in_flight.setdefault(slot, []).append(ticket)
        self._in_flight_of_round[slot] = self._num_of_round(slot) + 1
        return ticket

    def _num_left(self, slot: int) -> int:
        owner = self._owners.get(slot)
        if owner is None:
            return 0
        return len(range(owner, len(self._pool), len(self._owners))) - self._taken[owner]

    def _num_of_round(self, slot: int) -> int:
        """How many of the slot's tickets in flight were taken in this round; they are the last ones."""
        return self._in_flight_of_round.get(slot, 0)

    def _segments_left(self, owner: int) -> Iterator[range]:
        return self._pool.every(len(self._owners), owner + self._taken[owner] * len(self._owners))

    def _open_segments(self) -> Iterator[range]:
        for owner in range(len(self._taken)):
            yield from self._segments_left(owner)
        yield from (range(ticket, ticket + 1) for ticket in self._returned)


def _check_live(live: Collection[int]) -> set[int]:
    slots = set(live)
    if not slots or len(slots) != len(live):
        raise ValueError(f"`live={list(live)}` is not valid: expected at least one slot and none twice.")
    return slots
