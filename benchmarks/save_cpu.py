"""CPU time of saves: of the threads and processes that save, not what is left of two large totals."""

import os
import threading
import time
from contextlib import suppress

from lightning_ft.testing.processes import descendants

_PROCESS, _THREAD = 2, 6
"""What Linux adds to an id for the clock of its CPU time, see clock_getcpuclockid(3) and pthread_getcpuclockid(3)."""


def _seconds(number: int, kind: int) -> float:
    return time.clock_gettime((~number << 3) | kind)


class SavingClock:
    """CPU time of what saves: of all threads of this process but those that train, and of its descendants.

    The training thread counts while it is in a call that saves. That a step takes longer because caches and memory are
    shared with what saves does not.

    Training threads are those that run when this is made; it is to be made after the first steps.
    """

    def __init__(self) -> None:
        self._training = [int(name) for name in os.listdir("/proc/self/task")]
        assert threading.get_native_id() in self._training

    def read(self) -> dict[int, float]:
        """Return the seconds of each process that saves; of this one without the training threads."""
        found = {}
        for pid in descendants(os.getpid()):
            with suppress(OSError):  # it ended meanwhile
                found[pid] = _seconds(pid, _PROCESS)
        own = time.process_time()
        return found | {0: own - sum(_seconds(thread, _THREAD) for thread in self._training)}

    def since(self, before: dict[int, float]) -> float:
        """Return the seconds used after :meth:`read` returned ``before``."""
        return sum(seconds - before.get(pid, 0.0) for pid, seconds in self.read().items())
