"""The line that an index has for each tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

NO_BATCH = "no_batch:"
"""Name of the empty tensor that stands for a training batch which the rank that writes did not have."""


@dataclass(frozen=True)
class Moment:
    """Where in a training something was dumped.

    Args:
        step: Optimizer steps completed before.
        micro_batch: Which batch of that step; which batch of the loader where nothing is trained.
        loader: Which of several evaluation loaders.

    """

    step: int
    micro_batch: int
    loader: int = 0

    def follows(self, other: Moment) -> bool:
        """Whether it comes after ``other``, unless the training was taken back."""
        return (self.step, self.loader, self.micro_batch) > (other.step, other.loader, other.micro_batch)


@dataclass(frozen=True)
class Entry:
    """A tensor of a part.

    Args:
        name: ``KIND:PATH``, and for a tensor in something nested its place in there.
        step: As in :class:`Moment`.
        micro_batch: As in :class:`Moment`.
        loader: As in :class:`Moment`.
        call: How often the same was dumped in this batch before: a module may be called several times.
        rank: Part that it is in.
        shape: Of the tensor.
        dtype: What it was written as.
        was: What it was before, if that is something else.
        file: Where it lies.
        offset: At which byte there.
        size: How many bytes.
        xxh3: XXH3-64 of them, in hexadecimal.

    """

    name: str
    step: int
    micro_batch: int
    loader: int
    call: int
    rank: int
    shape: tuple[int, ...]
    dtype: str
    was: str
    file: str
    offset: int
    size: int
    xxh3: str

    def to_line(self) -> bytes:
        """Return the line, with its end."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        """Return what :meth:`to_line` made a line of."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "shape": tuple(fields["shape"])})

    @property
    def kind(self) -> str:
        """The first part of its name."""
        return self.name.partition(":")[0]
