"""The file in which rejected results are written down, a line each, and what to skip because of it.

The lines and the rule are Megatron's, so that its parsers read these files and this one reads those.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_ft.rerun.comparison import as_number
from lightning_ft.rerun.states import RerunValidationStatus

UNKNOWN_JOB = "N/A"
_LINE = re.compile(
    r"ts=(?P<ts>.+) node=(?P<node>.+) device=(?P<device>.+) jobID=(?P<job>.+) rank=(?P<rank>\d+)"
    r" iteration=(?P<iteration>\d+) status=(?P<status>\S+) result=(?P<result>.+?) message='(?P<message>.*)'$"
)
_COUNTED = (
    RerunValidationStatus.RERUN_DISABLED,
    RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE,
    RerunValidationStatus.SECOND_RERUN_REPRODUCIBLE,
)


class Tracker:
    """Appends a line for each result that was rejected or run again.

    Args:
        path: The file; it is made if it is not there.
        node: Name of this machine.
        device: The device of this rank.
        job: Tells the jobs apart that write to the file; the same on all ranks of one.

    Raises:
        RuntimeError: If the file can't be opened.

    """

    def __init__(self, path: str | os.PathLike[str], *, node: str, device: str, job: str) -> None:
        try:
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise RuntimeError(f"The tracker file {path} can't be opened for appending: {error}.") from error
        self._origin = f"node={node} device={device} jobID={job}"

    def write(self, *, rank: int, iteration: int, status: RerunValidationStatus, result: Any, message: str) -> None:
        """Write down one result; ``iteration`` counts from 1."""
        text = " ".join(message.split()).replace("'", '"')
        self._file.write(
            f"ts={datetime.now()} {self._origin} rank={rank} iteration={iteration} status={status.value}"
            f" result={_tell(result)} message='{text}'\n"
        )

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def iterations_to_skip(lines: Iterable[str]) -> list[int]:
    """Return the iterations, counted from 1, that are to be left out: one and the same rank failed in them twice or more.

    Where several ranks failed in the same job and iteration it is not the rank's own data that is to blame: it is kept.

    Args:
        lines: Of a tracker file.

    """
    failures: dict[tuple[int, int], int] = defaultdict(int)
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for line in lines:
        match = _LINE.match(line.strip())
        if match is None or match["status"] not in [status.value for status in _COUNTED]:
            continue
        rank, iteration = int(match["rank"]), int(match["iteration"])
        failures[rank, iteration] += 1
        if match["job"] != UNKNOWN_JOB:  # two lines of unknown jobs may be of two jobs
            ranks[match["job"], iteration].add(rank)
    kept = {iteration for (_, iteration), failed in ranks.items() if len(failed) > 1}
    return sorted({iteration for (_, iteration), count in failures.items() if count > 1} - kept)


def read_iterations_to_skip(path: str | os.PathLike[str]) -> list[int]:
    """Return `iterations_to_skip` of a file; nothing if there is none."""
    file = Path(path)
    return iterations_to_skip(file.read_text(errors="replace").splitlines()) if file.exists() else []


def _tell(result: Any) -> str:
    try:
        return repr(as_number(result))
    except (TypeError, ValueError, RuntimeError):  # a result of the user's own kind
        return " ".join(str(result).split())[:200] or "?"
