"""A run's events as a stream, together with those of the runs that it goes on from."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_ft.events.log import parse

RUN = "the event directory of a run, .../ft_events/<run id>, or one that it is in"
"""What commands take, for people; see :func:`find_run`."""
_PATTERN = "*.jsonl"
_EXPECTED = "Expected the directory of a run: .../ft_events/<run id>."


class EventStream:
    """The events of a run, sorted by time, read while they are iterated; those of earlier attempts first.

    Events of earlier attempts come from where the event ``resumed`` says that they are. Each event gets a field
    ``process``: how many attempts come before its own, slot and incarnation.

    Args:
        directory: That of a run: ``.../ft_events/<run id>``; may be in use.
        history: Whether to read earlier attempts, too.

    Raises:
        FileNotFoundError: If there are no events in ``directory``.

    """

    def __init__(self, directory: str | os.PathLike[str], *, history: bool = True) -> None:
        self.directories = _attempts(Path(directory)) if history else [Path(directory)]
        self.num_torn = 0
        """How many lines were left out so far, because their writer died in the middle of them."""
        if not _files(self.directories[-1]):
            raise FileNotFoundError(f"There are no events in {directory}. {_EXPECTED}")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, directory in enumerate(self.directories):
            files = [self._read(path, index) for path in _files(directory)]
            yield from heapq.merge(*files, key=_time)

    def _read(self, path: Path, index: int) -> Iterator[dict[str, Any]]:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                record = parse(line)
                if record is not None:
                    record["process"] = index, record.get("slot"), record.get("incarnation", 0)
                    yield record
                elif line.strip():
                    self.num_torn += 1


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the directory of a run's events.

    Args:
        path: That directory, or one that it is in; of several runs, the one that was written to last.

    Raises:
        FileNotFoundError: If there is none.

    """
    where = Path(path)
    if _files(where):
        return where
    runs = {file.parent for file in where.rglob(f"ft_events/*/{_PATTERN}")} if where.is_dir() else set()
    runs |= {file.parent for file in where.glob(f"*/{_PATTERN}") if where.name == "ft_events"}
    if not runs:
        raise FileNotFoundError(f"There are no events in {path}. {_EXPECTED}")
    return max(runs, key=lambda run: max(file.stat().st_mtime_ns for file in _files(run)))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(_PATTERN))


def _attempts(directory: Path) -> list[Path]:
    """The runs that led to this one, oldest first."""
    found = [directory]
    while (earlier := _resumed_from(found[0])) is not None and earlier not in found:
        found.insert(0, earlier)
    return found


def _resumed_from(directory: Path) -> Path | None:
    for path in _files(directory):
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"event":"resumed"' in line and (record := parse(line)) is not None:
                    return _existing(directory, record)
                if '"event":"step"' in line:  # it comes before the first step
                    break
    return None


def _existing(directory: Path, record: dict[str, Any]) -> Path | None:
    """Where the events of the run are that was resumed; it may have been moved together with this one's."""
    if "events" not in record:
        return None
    places = [Path(record["events"]), directory.with_name(Path(record["events"]).name)]
    return next((place for place in places if place != directory and _files(place)), None)


def _time(record: dict[str, Any]) -> float:
    return float(record["t"])
