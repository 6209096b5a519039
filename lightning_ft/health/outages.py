"""Which slots are away, and since when."""

from collections.abc import Iterable
from typing import Literal

_LONG = 50


class Outages:
    """Follows the membership of a job.

    Args:
        patience: Steps after which a slot that is away is told of, once for each time.

    """

    def __init__(self, patience: int = _LONG) -> None:
        self.patience = patience
        self.last = ""
        """The last fault, in short."""
        self._members: frozenset[int] = frozenset()
        self._away: dict[int, int] = {}
        self._told: set[int] = set()

    @property
    def away(self) -> dict[int, int]:
        """The slots that are away, and the step since which they are."""
        return dict(self._away)

    def start(self, step: int, members: Iterable[int], num_slots: int) -> None:
        """The training begins, with these."""
        self._members = frozenset(members)
        self._away = {slot: self._away.get(slot, step) for slot in set(range(num_slots)) - self._members}
        self._told &= set(self._away)

    def change(self, step: int, members: Iterable[int]) -> Literal["recovery", "joining"]:
        """Others take part than before; return what that means."""
        now = frozenset(members)
        gone, come = self._members - now, now - self._members
        self._members = now
        for slot in come:
            self._away.pop(slot, None)
            self._told.discard(slot)
        for slot in gone:
            self._away[slot] = step
        if come and not gone:
            return "joining"
        # Whoever is gone and back within a batch can't be named.
        who = ",".join(map(str, sorted(gone)))
        self.last = f"slot {who} @ {step}" if who else f"step {step}"
        return "recovery"

    def overdue(self, step: int) -> dict[int, int]:
        """Return those that are away for long and were not told yet, and since when."""
        found = {
            slot: since for slot, since in self._away.items() if step - since >= self.patience and slot not in self._told
        }
        self._told |= set(found)
        return found
