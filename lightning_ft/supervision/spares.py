"""Processes that wait at the Trainer call to become a rank when one dies: pure bookkeeping, time is an argument."""

from __future__ import annotations

from itertools import count

_PAUSE = 1.0  # seconds before one that was taken is replaced: until then the ranks need the processors
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


class Spares:
    """The spares by number. The numbers are negative, so that nobody takes one for a slot.

    Nothing depends on a spare: where none waits, a rank is started as if there were none at all.
    """

    def __init__(self) -> None:
        self._numbers = count(-1, -1)
        self._calls: dict[int, int | None] = {}  # the call that it waits at; None: it is on its way
        self._not_before = 0.0
        self._fruitless = 0  # how many in a row ended before they could wait

    def take_due(self, num_wanted: int, now: float) -> list[int]:
        """Return the numbers of spares to start now."""
        if now < self._not_before:
            return []
        numbers = [next(self._numbers) for _ in range(num_wanted - len(self._calls))]
        self._calls.update(dict.fromkeys(numbers))
        return numbers

    def parked(self, number: int, call: int) -> None:
        """Note that a spare waits at ``call``."""
        self._calls[number] = call
        self._fruitless = 0

    def take(self, now: float) -> int | None:
        """Return a spare that waits, which is none from now on: it becomes a rank."""
        waiting = [number for number, call in self._calls.items() if call is not None]
        if not waiting:
            return None
        del self._calls[waiting[0]]
        self._not_before = now + _PAUSE
        return waiting[0]

    def take_behind(self, call: int) -> list[tuple[int, int]]:
        """Return the spares that wait at an earlier call than ``call``, and at which; they are to go on."""
        behind = [(number, own) for number, own in self._calls.items() if own is not None and own < call]
        for number, _ in behind:
            self._calls[number] = None
        return behind

    def ended(self, number: int, now: float) -> None:
        """Note that the process of a spare is gone."""
        if self._calls.pop(number) is None:
            self._fruitless += 1
            self._not_before = now + min(_FIRST_DELAY * 2 ** (self._fruitless - 1), _LONGEST_DELAY)

    def deadline(self, num_wanted: int) -> float | None:
        """Return when :meth:`take_due` is to be called even if nothing happens."""
        return self._not_before if len(self._calls) < num_wanted else None
