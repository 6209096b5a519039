"""When a dead slot may start again: pure bookkeeping, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


@dataclass
class Respawns:
    """Respawns of each slot: how many within the window, and which are due when.

    A slot whose process has taken part in a step starts again at once; one that dies before that, again and again, waits
    twice as long each time.
    """

    _past: dict[int, list[float]] = field(default_factory=dict)
    _fruitless: dict[int, int] = field(default_factory=dict)
    _due: dict[int, float] = field(default_factory=dict)

    def schedule(self, slot: int, now: float, window: float, limit: int) -> int | None:
        """Schedule the next start of ``slot``.

        Returns:
            How many respawns of the slot this makes within ``window`` seconds, or None if that would exceed ``limit``.

        """
        recent = [time for time in self._past.get(slot, ()) if now - time < window]
        if len(recent) >= limit:
            return None
        fruitless = self._fruitless.get(slot, 0) if recent else 0
        delay = min(_FIRST_DELAY * 2 ** (fruitless - 1), _LONGEST_DELAY) if fruitless else 0.0
        self._fruitless[slot] = fruitless + 1
        self._past[slot] = [*recent, now]
        self._due[slot] = now + delay
        return len(recent) + 1

    def restart(self, slot: int, now: float) -> None:
        """Schedule a start of ``slot`` at once that does not count: nothing happened to its process."""
        self._due[slot] = now

    def progressed(self, slot: int) -> None:
        """Note that the process of ``slot`` takes part: should it die, something happened to it."""
        self._fruitless[slot] = 0

    def take_due(self, now: float) -> list[int]:
        """Return the slots to start now, and forget them."""
        due = sorted(slot for slot, time in self._due.items() if time <= now)
        for slot in due:
            del self._due[slot]
        return due

    def cancel(self) -> list[int]:
        """Forget all that is scheduled; return which slots that were."""
        slots = sorted(self._due)
        self._due.clear()
        return slots

    def has(self, slot: int) -> bool:
        """Return whether ``slot`` will start again."""
        return slot in self._due

    def deadline(self) -> float | None:
        """Return when the next start is due."""
        return min(self._due.values(), default=None)

    def __len__(self) -> int:
        return len(self._due)
