"""Memory of the supervisor's that ranks write to, and read after the death of who wrote it.

It has no name in any file system. It belongs to the supervisor and is gone with the last process that has it open: nothing
is left behind, whatever is killed. It takes no room before something is written to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

_PER_SLOT = 2


class HostMemory:
    """Two pieces of memory for each slot.

    Args:
        num_slots: How many slots the job has.

    """

    def __init__(self, num_slots: int) -> None:
        self._descriptors: list[int] = []
        with suppress(AttributeError, OSError):  # another system, or no more descriptors
            for number in range(_PER_SLOT * num_slots):
                self._descriptors.append(os.memfd_create(f"lightning_ft {number}"))

    @property
    def name(self) -> str:
        """What tells other processes where it is; empty if there is none."""
        return f"{os.getpid()}:{','.join(map(str, self._descriptors))}" if self._descriptors else ""

    def close(self) -> None:
        """Let go of it. May be called twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def paths_of(name: str) -> list[Sequence[str]]:
    """Return where a process opens the memory that is called ``name``, by slot; empty if there is none."""
    pid, _, descriptors = name.partition(":")
    paths = [f"/proc/{pid}/fd/{descriptor}" for descriptor in descriptors.split(",") if descriptor]
    return [paths[first : first + _PER_SLOT] for first in range(0, len(paths), _PER_SLOT)]
