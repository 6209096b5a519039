"""What is told of an exception that ends a rank, whatever that exception is made of."""

from __future__ import annotations

import traceback

from lightning_ft.elastic.protocol import Raised

_LONGEST_MESSAGE = 2_000
_LONGEST_TRACEBACK = 100_000


def describe_exception(error: BaseException, code: int, step: int = 0) -> Raised:
    """Return the message about an uncaught exception.

    Args:
        error: The exception; its ``__str__`` may raise, its text may be of any length.
        code: What this process will exit with.
        step: How many optimizer steps it completed.

    """
    trace = "" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error))
    return Raised(
        type="exception",
        exception=type(error).__qualname__,
        message=_shorten(_text(error), _LONGEST_MESSAGE),
        traceback=_shorten(trace, _LONGEST_TRACEBACK),
        place=_place(error),
        step=step,
        code=code,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"<its text is not known: {type(second).__name__} in __str__>"


def _place(error: BaseException) -> str:
    """Where it was raised: the same for what is the same error in several ranks, unlike its text."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _shorten(text: str, limit: int) -> str:
    """Leave out the middle: a traceback begins with where it happened and ends with what."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
