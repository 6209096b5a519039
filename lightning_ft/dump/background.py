"""A thread that writes, with a bound on the memory that what waits for it takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_PATIENCE = 600.0  # seconds without any progress


class Background:
    """Does tasks one after another in a thread of its own.

    Args:
        max_bytes: How many bytes tasks that wait may hold; a single one that is larger waits alone.
        patience: Seconds without any progress after which it is given up that there will be some.

    """

    def __init__(self, max_bytes: int, *, patience: float = _PATIENCE) -> None:
        self.max_bytes = max_bytes
        self.peak_bytes = 0
        """The most bytes that waited at once."""
        self.is_stuck = False
        """Whether there was no progress for so long that nobody waits any more."""
        self._patience = patience
        self._changed = threading.Condition()
        self._tasks: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._waiting_bytes = self._num_done = self._num_asked = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tensor dump", daemon=True)
        self._thread.start()

    def reserve(self, size: int) -> bool:
        """Wait until ``size`` more bytes may wait; return whether they may."""
        with self._changed:
            self._wait_for(lambda: self._waiting_bytes + size <= self.max_bytes or not self._waiting_bytes)
            if self.is_stuck or self._is_closed:
                return False
            self._waiting_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._waiting_bytes)
            return True

    def submit(self, task: Callable[[], None], size: int = 0) -> None:
        """Have ``task`` done, which holds ``size`` bytes that were reserved, and raises nothing."""
        with self._changed:
            if not self._is_closed:
                self._tasks.append((size, task))
                self._num_asked += 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Return once all is done that was submitted so far, or it is stuck."""
        with self._changed:
            asked = self._num_asked
            self._wait_for(lambda: self._num_done >= asked)

    def close(self) -> None:
        """Return once all is done, or it is stuck; nothing is from now on. May be called twice."""
        self.wait()
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.append((0, None))
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not (condition() or self.is_stuck):
            done = self._num_done

            def changed(done: int = done) -> bool:
                return condition() or self._num_done != done

            self.is_stuck = not self._changed.wait_for(changed, self._patience)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._tasks))
                size, task = self._tasks.popleft()
            if task is None:
                return
            task()
            del task  # with the copy that it holds
            with self._changed:
                self._waiting_bytes -= size
                self._num_done += 1
                self.is_stuck = False
                self._changed.notify_all()
