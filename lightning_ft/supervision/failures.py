"""What ranks raised: which of it was shown, and which of it is an error of the program rather than of one rank."""

from __future__ import annotations

from collections.abc import Collection

from lightning_ft.elastic.protocol import Raised

_Error = tuple[str, str]  # its type and where it was raised; texts may differ from rank to rank


class Failures:
    """The exceptions of a job. Pure; time is an argument."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str, str]] = set()
        self._current: dict[_Error, dict[int, int]] = {}  # -> slot -> step, since the last progress
        self._lasting: dict[_Error, tuple[int, float]] = {}  # -> the slot that it used up, when

    def is_new(self, raised: Raised) -> bool:
        """Return whether the user has not seen this traceback yet; afterwards it counts as seen."""
        key = (raised["exception"], raised["message"], raised["place"])
        is_new = bool(raised["traceback"]) and key not in self._shown
        self._shown.add(key)
        return is_new

    def add(self, slot: int, raised: Raised) -> None:
        """Note what ended the process of ``slot``."""
        self.progressed(raised["step"])  # reports of progress are rarer than steps
        self._current.setdefault(_error(raised), {})[slot] = raised["step"]

    def progressed(self, step: int) -> None:
        """Note that some rank committed ``step``: what was raised in earlier ones did not hit every rank."""
        for slots in self._current.values():
            for slot in [slot for slot, raised_at in slots.items() if raised_at < step]:
                del slots[slot]

    def is_everywhere(self, raised: Raised, members: Collection[int]) -> bool:
        """Return whether all ``members``, and at least two ranks, raised this without a step in between."""
        slots = self._current.get(_error(raised), {})
        return len(slots) > 1 and len(members) > 0 and slots.keys() >= set(members)

    def use_up(self, slot: int, raised: Raised, now: float) -> None:
        """Note that ``slot`` stays out, and that this was the last that its processes raised."""
        self._lasting[_error(raised)] = slot, now

    def used_up(self, slot: int, raised: Raised, now: float, window: float) -> int | None:
        """Return another slot that stays out because of the same error, since at most ``window`` seconds.

        One slot that raises again and again may have a broken device. An error that goes on in the next slot is one of the
        program or of its data: a sample that can't be read goes from rank to rank.
        """
        culprit, since = self._lasting.get(_error(raised), (slot, now))
        return culprit if culprit != slot and now - since < window else None


def _error(raised: Raised) -> _Error:
    return raised["exception"], raised["place"]
