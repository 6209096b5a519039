"""What a rank says when an exception ends it: once for all ranks, through the supervisor, instead of once for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from signal import SIGINT
from types import TracebackType

from lightning_ft.elastic.channel import connect
from lightning_ft.elastic.protocol import Hello, RankEnvironment
from lightning_ft.elastic.raised import describe_exception

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_uncaught() -> None:
    """Have uncaught exceptions of this process reported to the supervisor if it is a rank; may be called twice.

    It needs nothing but the environment, so that what a script raises before it reaches a Trainer is reported as well.
    """
    environment = RankEnvironment.of_process()
    if environment is not None and not isinstance(sys.excepthook, _Reporter):
        sys.excepthook = _Reporter(environment, sys.excepthook)


class _Reporter:
    def __init__(self, environment: RankEnvironment, otherwise: Hook) -> None:
        self._environment = environment
        self._otherwise = otherwise
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or not self._report(kind, error, trace):  # a child of a rank is not a rank
            self._otherwise(kind, error, trace)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
        environment = self._environment
        hello = Hello(type="hello", slot=environment.slot, incarnation=environment.incarnation, pid=os.getpid())
        code = 128 + SIGINT if issubclass(kind, KeyboardInterrupt) else 1
        try:
            channel = connect(environment.supervisor)
            channel.send(hello)
            channel.send(describe_exception(error.with_traceback(trace), code))
            channel.close()
        except OSError:
            return False
        return True
