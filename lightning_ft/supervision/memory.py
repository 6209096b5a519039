"""Whether the kernel killed a process for want of memory: SIGKILL by itself does not say who sent it, or why."""

from __future__ import annotations

import contextlib
from pathlib import Path


class OutOfMemoryKills:
    """How many processes the kernel has killed, in this process's control group if that is known, else on the machine.

    Args:
        root: Where ``proc`` and ``sys`` are.

    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counters = [*self._group_counters(), root / "proc/vmstat"]
        self._seen = self._count()

    def has_risen(self) -> bool:
        """Return whether there were any since this was asked last."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in self._counters:
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
        return 0

    def _group_counters(self) -> list[Path]:
        """Return what may count them for this process's control group: in version 2, in version 1, seen from a container."""
        found: list[Path] = []
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/cgroup").read_text().splitlines():
                number, controllers, group = line.split(":", 2)
                groups = self._root / "sys/fs/cgroup"
                places = [group.lstrip("/"), ""]
                if number == "0":
                    found += [groups / place / "memory.events" for place in places]
                elif "memory" in controllers.split(","):
                    found += [groups / "memory" / place / "memory.oom_control" for place in places]
        return found
