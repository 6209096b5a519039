"""Finds dumps, checks them, and reads what is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from lightning_ft.dump.index import Entry
from lightning_ft.dump.layout import (
    ATTEMPT,
    Attempt,
    Marker,
    attempt_number,
    index_file,
    read_attempt,
    read_marker,
    tensors_file,
)
from lightning_ft.dump.options import PHASES
from lightning_ft.dump.tensors import from_bytes
from lightning_ft.errors import DumpError


@dataclass(frozen=True)
class FoundAttempt:
    """An attempt on the disk.

    Args:
        path: Where.
        attempt: What it says of itself.
        markers: Those of its parts; None where a part is not whole.

    """

    path: Path
    attempt: Attempt
    markers: tuple[Marker | None, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all of its parts are whole."""
        return None not in self.markers

    @property
    def number(self) -> int:
        """Its number in its rollout."""
        return attempt_number(self.path) or 0

    def entries(self) -> list[Entry]:
        """Return what the indices of its parts list, in the order in which it was dumped.

        Raises:
            DumpError: If an index is not what was written.

        """
        return [
            entry for part, marker in enumerate(self.markers) if marker is not None for entry in self._part(part, marker)
        ]

    def _part(self, part: int, marker: Marker) -> Iterator[Entry]:
        path = self.path / index_file(part)
        try:
            with open(path, "rb") as file:
                data = file.read(marker.index_size)
            size = os.path.getsize(self.path / tensors_file(part))
        except OSError as error:
            raise DumpError(str(self.path), str(error)) from error
        if xxhash.xxh3_64_hexdigest(data) != marker.index_xxh3:
            raise DumpError(str(self.path), f"{path.name} does not match its checksum")
        if size < marker.tensors_size:
            raise DumpError(str(self.path), f"{tensors_file(part)} is cut off")
        for line in data.splitlines():
            yield Entry.from_line(line)

    def load(self, entry: Entry) -> Tensor:
        """Return a tensor.

        Raises:
            DumpError: If its bytes are not those that were written.

        """
        try:
            with open(self.path / entry.file, "rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise DumpError(str(self.path), str(error)) from error
        if xxhash.xxh3_64_hexdigest(data) != entry.xxh3:
            raise DumpError(str(self.path), f"`{entry.name}` in step {entry.step} does not match its checksum")
        return from_bytes(data, entry.dtype, list(entry.shape))

    def verify(self) -> None:
        """Check every byte.

        Raises:
            DumpError: If something is not what was written.

        """
        for entry in self.entries():
            self.load(entry)


@dataclass(frozen=True)
class Key:
    """What is the same in two dumps of the same training.

    Args:
        where: Role, phase and rollout, as far as the path that was asked for leaves them open.
        step: Optimizer steps completed before.
        loader: Which of several evaluation loaders.
        micro_batch: Which batch.
        name: What was dumped.
        call: How often it was before, in this batch.

    """

    where: str
    step: int
    loader: int
    micro_batch: int
    name: str
    call: int

    def __str__(self) -> str:
        parts = [self.where] if self.where not in ("", ".") else []
        parts += [f"step {self.step}", f"batch {self.micro_batch}"]
        parts += [f"loader {self.loader}"] if self.loader else []
        parts += [f"call {self.call}"] if self.call else []
        return f"{self.name} ({', '.join(parts)})"


@dataclass(frozen=True)
class Record:
    """A thing that was dumped, by one rank or by several.

    Args:
        order: Sorts records as they came in the training.
        found: The attempt that it is in.
        entries: By rank.

    """

    order: tuple[int | str, ...]
    found: FoundAttempt
    entries: tuple[Entry, ...]

    def load(self) -> list[Tensor]:
        """Return its tensors, by rank."""
        return [self.found.load(entry) for entry in self.entries]

    def is_same_as(self, other: Record) -> bool:
        """Whether all bytes are the same, as far as checksums tell."""
        return [_content(entry) for entry in self.entries] == [_content(entry) for entry in other.entries]


def find_attempts(path: str | os.PathLike[str]) -> list[FoundAttempt]:
    """Return the attempts at or below ``path``, sorted.

    Raises:
        DumpError: If there are none, or no such path.

    """
    root = Path(path)
    if not root.exists():
        raise DumpError(str(path), "it does not exist")
    paths = [root] if (root / ATTEMPT).exists() else [found.parent for found in root.rglob(ATTEMPT)]
    found = []
    for each in paths:
        attempt = read_attempt(each) if attempt_number(each.resolve()) is not None else None
        if attempt is not None:
            markers = tuple(read_marker(each, part) for part in range(attempt.num_parts))
            found.append(FoundAttempt(each, attempt, markers))
    if not found:
        raise DumpError(str(path), "there is no attempt of a rollout in it")
    return sorted(found, key=lambda f: (f.attempt.role, PHASES.index(f.attempt.phase), f.attempt.rollout, f.number))


def read_records(path: str | os.PathLike[str]) -> dict[Key, Record]:
    """Return what was dumped at or below ``path``, in the order in which it was.

    Of several attempts at a rollout those count that are whole, of the newest run; where they have the same, the last one.

    Raises:
        DumpError: If there is nothing that is whole, or it is damaged.

    """
    attempts = find_attempts(path)
    whole = [found for found in attempts if found.is_complete]
    if not whole:
        raise DumpError(str(path), f"none of the {len(attempts)} attempts in it is whole")
    newest: dict[Path, FoundAttempt] = {}
    for found in whole:
        known = newest.get(found.path.parent)
        if known is None or known.attempt.created <= found.attempt.created:
            newest[found.path.parent] = found
    records: dict[Key, Record] = {}
    for found in whole:
        if found.attempt.run_id == newest[found.path.parent].attempt.run_id:
            records.update(_records_of(found, Path(path)))
    return dict(sorted(records.items(), key=lambda item: item[1].order))


# A validation comes before the step that has the same number: it is counted when it is over.
_PHASE_ORDER = ("validate", "test", "predict", "train")


def _records_of(found: FoundAttempt, root: Path) -> dict[Key, Record]:
    attempt = found.attempt
    where = "" if found.path == root else os.path.relpath(found.path.parent, root)
    grouped: dict[Key, list[Entry]] = {}
    for entry in found.entries():
        key = Key(where, entry.step, entry.loader, entry.micro_batch, entry.name, entry.call)
        grouped.setdefault(key, []).append(entry)
    phase = _PHASE_ORDER.index(attempt.phase)

    def order(key: Key, entries: Sequence[Entry]) -> tuple[int | str, ...]:
        place = attempt.rollout, key.step, phase, attempt.role, key.loader, key.micro_batch
        return (*place, entries[0].rank, entries[0].offset, entries[0].size)

    return {key: Record(order(key, entries), found, tuple(entries)) for key, entries in grouped.items()}


def _content(entry: Entry) -> tuple[str, tuple[int, ...], str]:
    return entry.dtype, entry.shape, entry.xxh3
