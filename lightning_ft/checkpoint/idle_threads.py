"""Threads that stay for the next task: starting one keeps whoever starts it waiting until the new one gets a core."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

_Task = Callable[[], None]


@dataclass
class _Idle:
    inboxes: list[SimpleQueue[_Task | None]] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        while self.inboxes:
            self.inboxes.pop().put(None)


class IdleThreads:
    """As many threads as there were tasks at a time. They are daemons, and end with this object.

    Args:
        name: Of each thread.

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._idle = _Idle()
        weakref.finalize(self, self._idle.close)

    def run(self, task: _Task) -> None:
        """Have a thread of its own do something, beside earlier tasks. What it raises is told as of any thread."""
        if self._pid != os.getpid():  # threads do not come along into a forked process
            self._begin()
        if self._idle.inboxes:
            inbox = self._idle.inboxes.pop()
        else:
            inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(inbox, self._idle), name=self._name, daemon=True).start()
        inbox.put(task)

    def close(self) -> None:
        """End the threads, each once its task is done. May be called twice."""
        self._idle.close()


def _serve(inbox: SimpleQueue[_Task | None], idle: _Idle) -> None:
    while (task := inbox.get()) is not None:
        task()
        del task  # and what it holds, such as memory for a whole state
        idle.inboxes.append(inbox)
        if idle.closed:  # after the line above: whoever closes sees this thread, or is seen by it
            inbox.put(None)
