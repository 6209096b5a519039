"""Whether a value that was computed twice is the same."""

import math
from typing import Any

from torch import Tensor


def relative_difference(first: Any, second: Any) -> float:
    """Return how far two numbers are apart, relative to their size: 0.0 if they are the same, infinity at most.

    NaN is the same as NaN, an infinity the same as itself, and neither is like anything else.

    Args:
        first: A number, or a tensor of one element.
        second: The same.

    """
    a, b = as_number(first), as_number(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    size = max(abs(a), abs(b))
    # Divided first: neither the difference nor a sum of the two may overflow or vanish.
    return 2.0 * abs(a / size - b / size) / (abs(a) / size + abs(b) / size)


def as_number(value: Any) -> float:
    """Return a number, or the only element of a tensor, as a float."""
    return float(value.detach().item()) if isinstance(value, Tensor) else float(value)
