"""Checks of arguments; each error names the call as written, the value, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

_LONGEST = 1e9  # seconds, about 30 years: what is longer does not fit into the clocks it goes to


def check_count(call: str, name: str, value: object, *, least: int = 0) -> None:
    """Raise TypeError or ValueError unless ``value`` is an integer, ``least`` or more."""
    expected = f"expected an integer, {least} or more"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(_text(call, name, value, expected))
    if value < least:
        raise ValueError(_text(call, name, value, expected))


def check_seconds(call: str, name: str, value: object, *, zero: bool = False, none: bool = False) -> None:
    """Raise TypeError or ValueError unless ``value`` is a duration; ``zero`` and ``none`` say whether those are."""
    if none and value is None:
        return
    expected = f"expected seconds, {'0 or more' if zero else 'more than 0'}{', or None' if none else ''}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_text(call, name, value, expected))
    seconds = float(value)
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero):
        raise ValueError(_text(call, name, value, expected))
    if seconds > _LONGEST:
        raise ValueError(_text(call, name, value, f"{expected}, at most {_LONGEST:g}"))


def check_positive(call: str, name: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number greater than 0, or None."""
    expected = "expected a number greater than 0, or None"
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_text(call, name, value, expected))
    if not 0 < float(value) < math.inf:
        raise ValueError(_text(call, name, value, expected))


def check_choice(call: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ValueError(_text(call, name, value, f"expected one of {', '.join(map(repr, choices))}"))


def check_type(call: str, name: str, value: object, kind: type, expected: str) -> None:
    """Raise TypeError unless ``value`` is of type ``kind``, which ``expected`` describes."""
    if not isinstance(value, kind):
        raise TypeError(_text(call, name, value, f"expected {expected}"))


def _text(call: str, name: str, value: object, expected: str) -> str:
    return f"`{call}({name}={value!r})` is not valid: {expected}."
