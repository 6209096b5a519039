"""Pretended errors, to try out what a job does about them."""

import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from lightning_ft.elastic.checks import check_count
from lightning_ft.rerun.states import RerunDiagnostic, RerunState

log = logging.getLogger(__name__)


class RerunErrorInjector:
    """Has one in ``error_injection_rate`` validations rejected, and its reruns come out as if it were a given error.

    Values stay as they are. The random numbers are its own: the training draws the same as without it.

    Args:
        error_injection_rate: 0: never.
        error_injection_type: What the reruns are to find.
        seed: Of its random numbers.

    """

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic | str = RerunDiagnostic.TRANSIENT_ERROR,
        *,
        seed: int = 0,
    ) -> None:
        check_count("RerunErrorInjector", "error_injection_rate", error_injection_rate)
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = RerunDiagnostic(error_injection_type)
        self._random = random.Random(seed)
        self._injected: RerunDiagnostic | None = None

    def maybe_inject(self, rank: int = 0) -> bool:
        """Return whether to reject a value that is right; not while an earlier error is being looked into."""
        if self.error_injection_rate == 0 or self._injected is not None:
            return False
        if (self._random.randrange(self.error_injection_rate) + rank) % self.error_injection_rate:
            return False
        self._injected = self.error_injection_type
        log.info("Injected on rank %s: %s.", rank, self._injected.value)
        return True

    def maybe_miscompare(
        self, comparison_func: Callable[[Any, Any], float], initial_result: Any, result: Any, state: RerunState
    ) -> float:
        """Return how far two results are apart, or are to seem so."""
        injected = self._injected
        if injected is None:
            return comparison_func(initial_result, result)
        in_place = state == RerunState.RERUNNING_IN_PLACE
        if injected == RerunDiagnostic.TRANSIENT_ERROR or not in_place:
            self._injected = None
        if injected == RerunDiagnostic.TRANSIENT_ERROR:
            return math.inf if in_place else 0.0
        if injected == RerunDiagnostic.PERSISTENT_ERROR:
            return 0.0 if in_place else math.inf
        return 0.0

    def forget(self) -> None:
        """End what was injected: the step is decided."""
        self._injected = None

    def state_dict(self) -> dict[str, Any]:
        """Return the error that is being looked into, as plain data."""
        version, words, gauss = self._random.getstate()
        return {
            "injected": None if self._injected is None else self._injected.value,
            "random": [version, list(words), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._injected = None if state["injected"] is None else RerunDiagnostic(state["injected"])
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
