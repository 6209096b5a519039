"""Values that are a given number of times as large as is usual: what Megatron's state machine offers beside NaN checks."""

from collections.abc import Mapping
from typing import Any

from lightning_ft.rerun.baseline import Baseline

_LEAST = 8
_WARM_UP = 20


class LargeValues:
    """Knows what is usual in each context, which follows its last values; large ones, NaN and infinities never become it."""

    def __init__(self) -> None:
        self._baselines: dict[str, Baseline] = {}

    def judge(
        self, value: float, threshold: float, context: str, num_samples: int, *, resample: bool, remember: bool
    ) -> bool:
        """Return whether ``value`` is more than ``threshold`` times as large as is usual.

        Args:
            value: At least 0.
            threshold: How many times; more than 1.
            context: Which values belong together.
            num_samples: How many are remembered.
            resample: Whether to begin anew.
            remember: Whether this one is to be remembered: a rerun sees the same again.

        """
        if threshold <= 1:
            raise ValueError(f"`is_unexpectedly_large(threshold={threshold!r})` is not valid: expected more than 1.")
        window = max(num_samples, _LEAST)
        baseline = self._baselines.get(context)
        if baseline is None or baseline.window != window or resample:
            baseline = self._baselines[context] = _baseline(threshold - 1.0, window)
        judgement = baseline.judge(value)
        if remember and not judgement.is_bad:
            baseline.take(value)
        return judgement.kind == "spike"

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, as plain data."""
        return {context: [b.jump, b.window, b.state_dict()] for context, b in self._baselines.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        for context, (jump, window, values) in state.items():
            self._baselines[context] = _baseline(jump, window)
            self._baselines[context].load_state_dict(values)


def _baseline(jump: float, window: int) -> Baseline:
    return Baseline(jump=jump, window=window, warm_up=min(_WARM_UP, window))
