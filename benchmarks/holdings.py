"""What a process and its descendants hold: memory, file descriptors, shared memory, processes, files on the disk."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_ft.testing.processes import descendants


@dataclass(frozen=True)
class Holdings:
    """Counts.

    Args:
        mb: Resident memory of all of them together.
        descriptors: Open files, sockets and the like.
        shared_memories: Descriptors of memory without a name, and names in ``/dev/shm``.
        threads: Of all of them.
        processes: How many they are.
        files: Files and directories below a directory.

    """

    mb: float
    descriptors: int
    shared_memories: int
    threads: int
    processes: int
    files: int

    @classmethod
    def now(cls, directory: Path) -> "Holdings":
        pids = [os.getpid(), *descendants(os.getpid())]
        links = [link for pid in pids for link in _links(pid)]
        return cls(
            mb=sum(_resident_bytes(pid) for pid in pids) / (1 << 20),
            descriptors=len(links),
            shared_memories=sum("memfd:" in link for link in links) + len(os.listdir("/dev/shm")),
            threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            processes=len(pids),
            files=sum(1 for _ in directory.rglob("*")),
        )

    def growth(self, before: "Holdings") -> dict[str, float]:
        """Return how much more of each there is than ``before``."""
        old = asdict(before)
        return {name: value - old[name] for name, value in asdict(self).items()}


def _links(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # what listed them
            found.append(os.readlink(path))
    return found


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
