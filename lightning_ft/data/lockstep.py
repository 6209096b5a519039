"""A run of takes in which every live slot goes on by one ticket: all that is to know of it is how many takes there were."""

from collections.abc import Collection, ItemsView, Iterator, Mapping
from typing import Any


class Lockstep:
    """Counts takes in which each of the same slots takes the next ticket of its own.

    Args:
        live: The slots.
        hands: What each will take next; the first that is used up ends the run.
        num_until_all_is_taken: How many takes there are until no ticket is open, this run's and later ones.

    """

    __slots__ = ("hands", "live", "num_committed", "num_taken", "num_takes", "num_until_all_is_taken")

    def __init__(self, live: tuple[int, ...], hands: Mapping[int, range], num_until_all_is_taken: int) -> None:
        self.live = live
        self.hands = hands
        self.num_takes = min(map(len, hands.values()))
        """How many there can be."""
        self.num_until_all_is_taken = num_until_all_is_taken
        self.num_taken = 0
        self.num_committed = 0

    def are_of(self, slots: Collection[int]) -> bool:
        """Whether exactly these slots go on together, in this order."""
        return tuple(slots) == self.live

    def take(self) -> "TakenTickets":
        """Go on; return what each slot takes."""
        self.num_taken += 1
        return TakenTickets(self.hands, self.num_taken - 1)

    def commit(self) -> "DoneTickets":
        """Return what each slot took since the last time."""
        done = DoneTickets(self.hands, self.num_committed, self.num_taken)
        self.num_committed = self.num_taken
        return done

    @property
    def in_flight(self) -> "DoneTickets":
        """What each slot took since the last commit."""
        return DoneTickets(self.hands, self.num_committed, self.num_taken)


class TakenTickets(Mapping[int, int | None]):
    """The ticket of each slot in one take, computed for those that are asked for."""

    __slots__ = ("_hands", "_number")

    def __init__(self, hands: Mapping[int, range], number: int) -> None:
        self._hands = hands
        self._number = number

    def __getitem__(self, slot: int) -> int:
        return self._hands[slot][self._number]

    def get(self, slot: int, default: Any = None) -> Any:
        hand = self._hands.get(slot)
        return default if hand is None else hand[self._number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hands)

    def __len__(self) -> int:
        return len(self._hands)

    def __repr__(self) -> str:
        return repr(dict(self))


class DoneTickets(Mapping[int, list[int]]):
    """The tickets of each slot in consecutive takes, computed for those that are asked for."""

    __slots__ = ("_begin", "_end", "_hands")

    def __init__(self, hands: Mapping[int, range], begin: int, end: int) -> None:
        self._hands = hands
        self._begin = begin
        self._end = end

    def __getitem__(self, slot: int) -> list[int]:
        return list(self._hands[slot][self._begin : self._end])

    def items(self) -> ItemsView[int, list[int]]:
        begin, end = self._begin, self._end
        return {slot: list(hand[begin:end]) for slot, hand in self._hands.items()}.items()

    def __iter__(self) -> Iterator[int]:
        return iter(self._hands)

    def __len__(self) -> int:
        return len(self._hands)

    def __repr__(self) -> str:
        return repr(dict(self.items()))
