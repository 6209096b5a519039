"""Who keeps the others waiting: own step times, against those of the others and against a rank's own past."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

_PAST = 64
_ENOUGH = 4


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow for some time now.

    Args:
        slot: Its slot; without slots, its rank.
        seconds: What its own part of a step takes.
        over_peers: How many times as long as the median of the others.
        over_past: How many times as long as it used to take itself; None if that is not known yet.
        since: The step at which it was slow first.

    """

    slot: int
    seconds: float
    over_peers: float
    over_past: float | None
    since: int

    def __str__(self) -> str:
        past = "" if self.over_past is None else f", and {self.over_past:.1f} times what it took before"
        return (
            f"slot {self.slot} takes {1e3 * self.seconds:.0f} ms for its part of a step since step {self.since}:"
            f" {self.over_peers:.1f} times the others' median{past}"
        )


class StragglerWatch:
    """Compares the ranks; the same on all of them, if they are given the same.

    Args:
        ratio: A rank is slow that takes so many times as long as the median of the others.
        least: Seconds by which it must exceed that median, too: on a busy machine short steps vary that much.
        patience: How many windows in a row it must be slow in.

    """

    def __init__(self, ratio: float = 1.5, least: float = 0.02, patience: int = 5) -> None:
        self.ratio = ratio
        self.least = least
        self.patience = patience
        self._slow: dict[int, tuple[int, int]] = {}  # slot: windows in a row, step of the first one
        self._past: dict[int, deque[float]] = {}
        self._told: set[int] = set()
        self.over_peers: dict[int, float] = {}
        """How each rank compared with the others in the last window."""

    def observe(self, step: int, seconds: Mapping[int, float]) -> list[Straggler]:
        """Take in how long each rank's own part of a step took in the window that ends with ``step``.

        Returns:
            Those that turned out to be stragglers in this window; each is named once, until it is as fast as the others.

        """
        found = []
        self.over_peers = {}
        for slot in set(self._slow) - set(seconds):  # away: whoever comes back begins anew
            self._forget(slot)
        for slot, own in seconds.items():
            others = [value for other, value in seconds.items() if other != slot]
            past = self._past.setdefault(slot, deque(maxlen=_PAST))
            if others and (straggler := self._judge(step, slot, own, median(others), past)) is not None:
                found.append(straggler)
            if slot not in self._slow:  # its past is what it took when it was not slow
                past.append(own)
        return found

    def _judge(self, step: int, slot: int, own: float, peers: float, past: deque[float]) -> Straggler | None:
        self.over_peers[slot] = own / peers if peers > 0.0 else 1.0
        if own <= self.ratio * peers or own - peers < self.least:
            self._slow.pop(slot, None)
            self._told.discard(slot)
            return None
        count, since = self._slow.get(slot, (0, step))
        self._slow[slot] = (count + 1, since)
        if count + 1 < self.patience or slot in self._told:
            return None
        self._told.add(slot)
        over_past = own / median(past) if len(past) >= _ENOUGH and median(past) > 0.0 else None
        return Straggler(slot, own, self.over_peers[slot], over_past, since)

    def _forget(self, slot: int) -> None:
        self._slow.pop(slot, None)
        self._told.discard(slot)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen."""
        return {
            "slow": [[slot, *value] for slot, value in self._slow.items()],
            "past": [[slot, *values] for slot, values in self._past.items()],
            "told": sorted(self._told),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was seen."""
        self._slow = {int(slot): (int(count), int(since)) for slot, count, since in state["slow"]}
        self._past = {int(slot): deque(values, maxlen=_PAST) for slot, *values in state["past"]}
        self._told = set(state["told"])
