"""Where steps that were run again from an earlier state begin to differ from what they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ft.rerun.comparison import relative_difference
from lightning_ft.rerun.replica_state import differing
from lightning_ft.rerun.step_values import LOSS, NORM, OWN_NORM, Measured

PARAMETERS = "parameters"
_ORDER = (PARAMETERS, LOSS, OWN_NORM, NORM)  # as one follows from the other within a step
_MAX_NAMES = 8
_EVIDENCE = 3  # steps
_PART = 10  # steps for each that did not come out the same


@dataclass(frozen=True)
class StepRecord:
    """What a rank knows of a step.

    Args:
        step: Which one, from 1.
        parameters: A number for each parameter, as it was when the step had its gradient.
        measured: What the step computed.

    """

    step: int
    parameters: Mapping[str, int]
    measured: Sequence[Measured] = ()


@dataclass(frozen=True)
class Divergence:
    """The first thing that differs on a rank.

    Args:
        step: In which step, from 1.
        what: "parameters": they were others before the step was applied, after the one before was: its update went wrong,
            or their memory did. "loss", "own gradient norm", "gradient norm": it was computed otherwise.
        value: What it was; None for parameters.
        replayed: What it is now.
        names: Of the parameters that differ, the first ones.

    """

    step: int
    what: str
    value: float | None = None
    replayed: float | None = None
    names: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """What comes before what."""
        return self.step, _ORDER.index(self.what)

    def __str__(self) -> str:
        if self.what == PARAMETERS:
            return f"parameters before step {self.step} is applied: {', '.join(self.names)}"
        return f"{self.what} of step {self.step}: {self.value:.6g}, now {self.replayed:.6g}"


class Exactness:
    """Whether a device computes the same twice, bit for bit, as learned from the steps that it ran again.

    As long as nearly all came out so, any difference is worth telling; otherwise only one beyond the tolerance is.
    """

    def __init__(self) -> None:
        self._num_same = 0
        self._num_other = 0

    def learn(self, is_same: bool) -> None:
        """Take in a step that came out the same, or the first one that did not."""
        self._num_same += is_same
        self._num_other += not is_same

    @property
    def is_expected(self) -> bool:
        """Whether the next step is to come out bit for bit."""
        return self._num_same >= _EVIDENCE and self._num_other * _PART <= self._num_same


def first_divergence(
    before: Sequence[StepRecord], now: Sequence[StepRecord], tolerance: float, exactness: Exactness
) -> Divergence | None:
    """Return where steps differ first.

    Parameters are compared as long as all that was computed came out bit for bit: else they can't be expected to.

    Args:
        before: The steps, from the same state on.
        now: The same steps, run again.
        tolerance: By what part values may differ where the device does not compute the same twice.
        exactness: What is known of that.

    """
    is_same = True
    for first, again in zip(before, now, strict=True):
        if is_same and (names := differing(first.parameters, again.parameters)):
            return Divergence(first.step, PARAMETERS, names=tuple(names[:_MAX_NAMES]))
        allowed = 0.0 if is_same and exactness.is_expected else tolerance
        for one, other in zip(first.measured, again.measured, strict=False):
            difference = relative_difference(one.value, other.value)
            if difference > 0.0 and is_same:
                is_same = False
                exactness.learn(False)
            if difference > allowed:
                return Divergence(first.step, one.name, one.value, other.value)
        if len(first.measured) != len(again.measured):
            return Divergence(first.step, LOSS, float(len(first.measured)), float(len(again.measured)))
        if is_same and first.measured:
            exactness.learn(True)
    return None


def earliest(of_ranks: Mapping[int, Divergence | None]) -> dict[int, Divergence]:
    """Return the ranks that differed first, with what: the others' differences follow from theirs."""
    found = {rank: divergence for rank, divergence in of_ranks.items() if divergence is not None}
    first = min((divergence.place for divergence in found.values()), default=None)
    return {rank: divergence for rank, divergence in found.items() if divergence.place == first}
