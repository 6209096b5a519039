"""How the job ended, from how its slots ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from lightning_ft.elastic.protocol import Raised

_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Ending:
    """How the process of a slot ended.

    Args:
        slot: The slot.
        incarnation: Which of its processes.
        code: Exit code; ``-signum`` if a signal ended it.
        how: The same in words: "SIGKILL", "exit code 1", "ValueError: ...".
        is_complete: Whether it had nothing left to do: not a death.
        has_led: Whether a signal ended it when it was rank 0 of the newest Trainer call, and that was over: nobody else
            does what a script leaves to rank 0 after its last call.

    """

    slot: int
    incarnation: int
    code: int
    how: str
    is_complete: bool
    has_led: bool = False


def describe(code: int) -> str:
    """Return "SIGKILL", "exit code 1" and the like."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def tell_raised(raised: Raised) -> str:
    """Return what a rank raised in a part of a line: "ValueError: not today"."""
    text = raised["message"].strip().partition("\n")[0]
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    return ": ".join(part for part in (raised["exception"], text) if part)


def exit_code(code: int) -> int:
    """Return what a shell would report for ``code``."""
    return 128 - code if code < 0 else code


class Outcome:
    """The endings of the slots that did not come back."""

    def __init__(self) -> None:
        self._endings: dict[int, Ending] = {}

    def add(self, ending: Ending) -> None:
        """Note that the process of a slot ended; of several deaths in a row the first explains the others."""
        if ending.is_complete:
            self._endings.pop(ending.slot, None)
        self._endings.setdefault(ending.slot, ending)

    def forget(self, slot: int) -> None:
        """Note that ``slot`` is a member again: how it once ended no longer explains anything."""
        self._endings.pop(slot, None)

    @property
    def is_near(self) -> bool:
        """Whether the script of a slot is over, as those of the others will be."""
        return any(ending.is_complete and ending.code >= 0 for ending in self._endings.values())

    def verdict(self, terminated_by: int | None = None) -> tuple[int, str | None]:
        """Return the job's exit code and, if it is not 0, the reason.

        Args:
            terminated_by: The signal that asked the job to end.

        """
        endings = list(self._endings.values())
        codes = [exit_code(ending.code) for ending in endings]
        if terminated_by is not None and 128 + terminated_by in codes:
            return 128 + terminated_by, None
        leader = next((ending for ending in endings if ending.has_led), None)
        if leader is not None:
            told = f"Rank 0 died after the last Trainer call: {self._tell([leader])}. What it did then is missing."
            return exit_code(leader.code), told
        completed = [ending for ending in endings if ending.is_complete and ending.code >= 0]
        if completed:
            first = next((ending for ending in completed if ending.code), None)
            if first is None:
                return 0, None
            return first.code, f"The job ended with {self._tell([first])}."
        raised = [ending for ending in endings if ending.code > 0]
        if raised:
            return raised[0].code, f"The job ended with {self._tell([raised[0]])}."
        if not endings:
            return 1, "The job ended before a rank was started."
        return exit_code(endings[0].code), f"All ranks are gone: {self._tell(endings)}."

    @staticmethod
    def _tell(endings: list[Ending]) -> str:
        return ", ".join(f"slot {ending.slot} ({ending.how})" for ending in endings)
