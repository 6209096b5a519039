"""The streams that the tickets of a round were dealt into, and how far each slot is in its own; pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from lightning_ft.data.lockstep import Lockstep
from lightning_ft.data.segments import SegmentPool


class Dealing:
    """Which tickets each slot has left in its stream, which are in flight, and which came back.

    Every ticket that is not done is in exactly one of these places.

    Args:
        segments: The tickets of the round, in dealing order.
        slots: Those that they are dealt to, one each in turns.

    """

    def __init__(self, segments: Iterable[range], slots: Sequence[int]) -> None:
        self.in_flight: dict[int, list[int]] = {}
        """What each slot took since the last commit, in the order in which it did."""
        self.returned: list[int] = []
        """Open tickets that are in no stream."""
        self._deal(segments, slots)
        self.num_open = len(self.pool)
        """How many tickets are in a stream or came back."""

    def _deal(self, segments: Iterable[range], slots: Sequence[int]) -> None:
        self.pool = SegmentPool(segments)
        self.owners = {slot: index for index, slot in enumerate(slots)}
        self.taken = [0] * len(slots)
        self._num_of_round: dict[int, int] = {}

    def deal_again(self, segments: Iterable[range], slots: Sequence[int]) -> None:
        """Begin a round with all open tickets. What is in flight stays so, but its places belonged to the old round."""
        self.returned = []
        self._deal(segments, slots)

    def num_left(self, slot: int) -> int:
        """How many tickets the stream of a slot has."""
        owner = self.owners.get(slot)
        if owner is None:
            return 0
        return len(range(owner, len(self.pool), len(self.owners))) - self.taken[owner]

    def left(self, slot: int) -> Iterator[range]:
        """The stream of a slot."""
        owner = self.owners.get(slot)
        return iter(()) if owner is None else self._left_of(owner)

    def num_of_round(self, slot: int) -> int:
        """How many of the slot's tickets in flight were taken in this round; they are the last ones."""
        return self._num_of_round.get(slot, 0)

    def open_segments(self) -> Iterator[range]:
        """All open tickets: the streams one after another, then what came back."""
        for owner in range(len(self.taken)):
            yield from self._left_of(owner)
        yield from (range(ticket, ticket + 1) for ticket in self.returned)

    def take(self, slot: int) -> int | None:
        """Move the next ticket of a stream into flight; return it, or None if there is none."""
        ticket = next(chain.from_iterable(self.left(slot)), None)
        if ticket is not None:
            self._take_off(slot, [ticket], 1)
        return ticket

    def take_in_lockstep(self, steps: Lockstep) -> None:
        """Take what was taken in lockstep since this is how it was at its begin; a part of it may be committed."""
        for slot, tickets in steps.in_flight.items():
            self._take_off(slot, tickets, steps.num_taken)

    def _take_off(self, slot: int, in_flight: list[int], num_taken: int) -> None:
        self.taken[self.owners[slot]] += num_taken
        self.num_open -= num_taken
        if in_flight:
            self.in_flight.setdefault(slot, []).extend(in_flight)
            self._num_of_round[slot] = self.num_of_round(slot) + len(in_flight)

    def put_in_flight(self, slot: int, num: int) -> None:
        """Say that the last tickets which a stream lacks are in flight."""
        owner, stride = self.owners[slot], len(self.owners)
        end = self.taken[owner]
        tickets = [self.pool[owner + number * stride] for number in range(end - num, end)]
        self.in_flight.setdefault(slot, []).extend(tickets)
        self._num_of_round[slot] = num

    def commit(self, contributors: Iterable[int]) -> dict[int, list[int]]:
        """Land what is in flight; return what of it is done. What others than ``contributors`` have comes back."""
        done = {slot: self.in_flight.pop(slot, []) for slot in contributors}
        for _, tickets in sorted(self.in_flight.items()):
            self.give_back(tickets)
        self.in_flight.clear()
        self._num_of_round.clear()
        return done

    def give_back(self, tickets: Sequence[int]) -> None:
        """Open tickets that were done or in flight."""
        self.returned += tickets
        self.num_open += len(tickets)

    def wind_back(self, slot: int) -> None:
        """Open what a slot has in flight, where it can be at its own place in the stream."""
        tickets = self.in_flight.pop(slot, [])
        num_of_round = self._num_of_round.pop(slot, 0)
        if num_of_round:
            self.taken[self.owners[slot]] -= num_of_round
            self.num_open += num_of_round
        self.give_back(tickets[: len(tickets) - num_of_round])

    def _left_of(self, owner: int) -> Iterator[range]:
        return self.pool.every(len(self.owners), owner + self.taken[owner] * len(self.owners))
