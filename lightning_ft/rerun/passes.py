"""What was validated in a step and in its rerun, call by call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_ft.rerun.comparison import as_number
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.states import Call

Compare = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Validated:
    """One result of a pass.

    Args:
        result: The result.
        is_rejected: Whether it is bad.
        fatal: Whether a bad one must not be applied.
        compare: How far two results are apart.
        tolerance: How far they may be.
        expected: What it should have been, for a reader.
        shared: Whether it is the same on all ranks.
        micro_batch: Of which micro-batch of the step it is; None: of the whole step.

    """

    result: Any
    is_rejected: bool
    fatal: bool
    compare: Compare
    tolerance: float
    expected: str
    shared: bool
    micro_batch: int | None


class Passes:
    """The validations of a step in its newest two passes."""

    def __init__(self) -> None:
        self._passes: list[dict[Call, Validated]] = [{}]
        self._counts: dict[str, int] = {}
        self.is_final = False
        """Whether the step can't be run again: what was rejected counts as reproduced, and nobody says that it was."""

    @property
    def num_reruns(self) -> int:
        """How often the step was run again."""
        return len(self._passes) - 1

    @property
    def any_rejected(self) -> bool:
        """Whether the newest pass has a result that was rejected."""
        return any(validated.is_rejected for validated in self._passes[-1].values())

    def begin_again(self) -> None:
        """Begin a further pass."""
        self._passes.append({})
        self._counts.clear()

    def add(self, message: str, validated: Validated) -> None:
        """Take in the next validation of the pass under way."""
        count = self._counts.get(message, 0)
        self._counts[message] = count + 1
        self._passes[-1][Call(message, count)] = validated

    def newest(self, call: Call) -> Validated | None:
        """Return the validation of the newest pass."""
        return self._passes[-1].get(call)

    def differences(self) -> Iterator[tuple[str, float]]:
        """Return how far the results of the newest two passes are apart, with what they are."""
        for call, first in self._passes[-2].items():
            if (again := self.newest(call)) is not None:
                yield call.message, first.compare(first.result, again.result)

    def findings(self, rank: int, miscompare: Callable[[Compare, Any, Any], float]) -> list[Finding]:
        """Return what was rejected in one of the newest two passes.

        Args:
            rank: This one.
            miscompare: Compares two results by the function given, or pretends to.

        """
        if self.is_final:
            told = [(call, validated) for call, validated in self._passes[-2].items() if validated.is_rejected]
            return [replace(_finding(rank, call, one, None, miscompare), is_reproduced=True) for call, one in told]
        before, now = self._passes[-2:]
        return [
            _finding(rank, call, before.get(call), now.get(call), miscompare)
            for call in [*before, *(now.keys() - before.keys())]
            if any(call in one and one[call].is_rejected for one in (before, now))
        ]


def _finding(
    rank: int,
    call: Call,
    first: Validated | None,
    again: Validated | None,
    miscompare: Callable[[Compare, Any, Any], float],
) -> Finding:
    told = first if first is not None and (first.is_rejected or again is None) else again
    assert told is not None
    is_reproduced = False
    if first is not None and first.is_rejected and again is not None:
        # A difference of NaN, from a comparison of the user's own, is none that is tolerated.
        is_reproduced = bool(miscompare(first.compare, first.result, again.result) <= first.tolerance)
    return Finding(
        rank=rank,
        message=call.message,
        sequence=call.sequence,
        value=plain(told.result),
        fatal=told.fatal,
        expected=told.expected,
        shared=told.shared,
        micro_batch=told.micro_batch,
        rerun_value=None if again is None else plain(again.result),
        is_reproduced=is_reproduced,
        is_still_bad=again is not None and again.is_rejected,
    )


def plain(result: Any) -> Any:
    """Return a number for what is one, and what is of the user's own kind as it is."""
    try:
        return as_number(result)
    except (TypeError, ValueError, RuntimeError):
        return result
