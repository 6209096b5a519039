"""Deals the batches of an epoch over slots that may come and go; pure, and the same on every rank."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_ft.data.dealing import Dealing
from lightning_ft.data.lockstep import Lockstep
from lightning_ft.data.segments import from_runs, from_triples, merge_segments, to_runs, to_triples

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
        self.begin_with(epoch, [range(self.num_tickets)])

    def begin_with(self, epoch: int, segments: Iterable[range]) -> None:
        """Deal round 0 of an epoch in which only the tickets in ``segments`` are open."""
        self.epoch = epoch
        self._begin_dealing(0, segments, range(self.num_slots))

    def _begin_dealing(self, number: int, segments: Iterable[range], slots: Sequence[int]) -> None:
        self.round = number
        self._steps: Lockstep | None = None
        self._dealing_before_steps = Dealing(segments, slots)

    @property
    def _dealing(self) -> Dealing:
        """Where every ticket is.

        Takes in lockstep are counted, but not entered: that costs the same whatever the number of slots. They are entered
        here, before anybody looks, and so that nobody can change anything under them.
        """
        steps, self._steps = self._steps, None
        if steps is not None:
            self._dealing_before_steps.take_in_lockstep(steps)
        return self._dealing_before_steps

    @property
    def num_open(self) -> int:
        """How many tickets are neither done nor in flight."""
        return self._dealing.num_open

    @property
    def in_flight(self) -> dict[int, list[int]]:
        """Tickets taken since the last commit, by slot, in the order in which they were taken."""
        return {slot: list(tickets) for slot, tickets in self._dealing.in_flight.items()}

    def open_tickets(self) -> Iterator[int]:
        """Lazily, all tickets that are neither done nor in flight, as a new round would deal them."""
        return chain.from_iterable(self._dealing.open_segments())

    def open_segments(self) -> list[range]:
        """All tickets that are neither done nor in flight, in the order of the round."""
        dealing = self._dealing
        if not dealing.returned and len(set(dealing.taken)) == 1:  # nobody is ahead of the others
            return list(dealing.pool.every(1, dealing.taken[0] * len(dealing.taken)))
        return merge_segments(range(ticket, ticket + 1) for ticket in sorted(self.open_tickets()))

    def remaining_steps(self, live: Collection[int]) -> int:
        """How many further calls of :meth:`take` will yield tickets if ``live`` does not change."""
        steps = self._steps
        if steps is not None and (live is steps.live or steps.are_of(live)):
            return steps.num_until_all_is_taken - steps.num_taken
        slots, dealing = _check_live(live), self._dealing
        orphaned = sum(len(tickets) for slot, tickets in dealing.in_flight.items() if slot not in slots)
        return -(-(dealing.num_open + orphaned) // len(slots))

    def upcoming(self, slot: int) -> Iterator[int]:
        """Lazily, the tickets that ``slot`` will take next if no new round begins: what its workers may prefetch."""
        return chain.from_iterable(self._dealing.left(slot))

    def take(self, live: Collection[int]) -> Mapping[int, int | None]:
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
        steps = self._steps
        if steps is not None and steps.num_taken < steps.num_takes and (live is steps.live or steps.are_of(live)):
            return steps.take()
        slots, dealing = _check_live(live), self._dealing
        for slot in sorted(dealing.in_flight.keys() - slots):
            dealing.wind_back(slot)
        if not dealing.num_open:
            return {}
        if _needs_new_round([dealing.num_left(slot) for slot in live], dealing.num_open):
            dealing.deal_again(merge_segments(dealing.open_segments()), sorted(live))
            self.round += 1
        hands = {slot: next(dealing.left(slot), range(0)) for slot in live}
        if not all(hands.values()):
            return {slot: dealing.take(slot) for slot in live}
        self._steps = steps = Lockstep(tuple(live), hands, num_until_all_is_taken=-(-dealing.num_open // len(slots)))
        return steps.take()

    def commit(self, contributors: Collection[int]) -> Mapping[int, list[int]]:
        """Mark the tickets of a committed optimizer step as done.

        Tickets in flight on other slots are not in that step. They are dealt again in the next round, not at the slot's
        own position: should the slot be alive, its workers are already past them.

        Args:
            contributors: Slots whose gradients are in the step.

        Returns:
            The tickets done, by contributor.

        """
        steps = self._steps
        if (
            steps is not None
            and (contributors is steps.live or steps.are_of(contributors))
            and not self._dealing_before_steps.in_flight
        ):
            return steps.commit()
        return self._dealing.commit(contributors)

    def reopen(self, tickets: Sequence[int]) -> None:
        """Take back that tickets are done: the step that had them is not applied as it was."""
        self._dealing.give_back(tickets)

    def remove(self, slot: int) -> None:
        """Record a death: what the slot has in flight is open again, and its next incarnation begins there."""
        self._dealing.wind_back(slot)

    def add(self, slot: int) -> None:
        """Record that a new incarnation of a slot joins.

        It continues the slot's stream of this round. If there is none, the next :meth:`take` that includes it begins a
        new round, unless that would not save a step.
        """
        self.remove(slot)  # in case nobody recorded the death of the incarnation before

    def state_dict(self) -> dict[str, Any]:
        """The plan as plain data; small whatever the number of tickets."""
        dealing = self._dealing
        owners, taken, of_round = list(dealing.owners), dealing.taken, dealing.num_of_round
        old = {slot: tickets[: len(tickets) - of_round(slot)] for slot, tickets in dealing.in_flight.items()}
        return {
            "version": _STATE_VERSION,
            "num_tickets": self.num_tickets,
            "epoch": self.epoch,
            "round": self.round,
            "num_open": dealing.num_open,
            "pool": to_triples(dealing.pool.segments),
            "owners": to_triples(merge_segments(range(slot, slot + 1) for slot in owners)),
            "taken": max(taken),
            "behind": to_runs(max(taken) - number for number in taken),
            "in_flight": to_runs(map(of_round, owners)),
            "in_flight_of_older_rounds": [[slot, tickets] for slot, tickets in old.items() if tickets],
            "returned": to_triples(merge_segments(range(ticket, ticket + 1) for ticket in dealing.returned)),
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
        owners = list(chain.from_iterable(from_triples(state["owners"])))
        self._begin_dealing(state["round"], from_triples(state["pool"]), owners)
        dealing = self._dealing
        dealing.num_open = state["num_open"]
        dealing.returned = list(chain.from_iterable(from_triples(state["returned"])))
        dealing.taken = [int(state["taken"]) - behind for behind in from_runs(state["behind"])]
        dealing.in_flight = {slot: list(tickets) for slot, tickets in state["in_flight_of_older_rounds"]}
        for slot, count in zip(owners, from_runs(state["in_flight"]), strict=True):
            if count:
                dealing.put_in_flight(slot, count)


def _needs_new_round(left: list[int], num_open: int) -> bool:
    """Whether a stream is used up and dealing again reaches more tickets or saves a step.

    Without the second half the uneven last step of every epoch would cost each rank a restart of its workers.
    """
    return min(left) == 0 and (sum(left) < num_open or max(left) > -(-num_open // len(left)))


def _check_live(live: Collection[int]) -> set[int]:
    slots = set(live)
    if not slots or len(slots) != len(live):
        raise ValueError(f"`live={list(live)}` is not valid: expected at least one slot and none twice.")
    return slots
