"""The proof of what was trained: of each epoch, which batches by which process, which twice and which never."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_ft.events.audit import audit
from lightning_ft.events.history import RUN, find_run
from lightning_ft.events.log import read_events


@dataclass(frozen=True)
class EpochProof:
    """What became of the batches of one epoch.

    Args:
        epoch: Its number.
        num_tickets: Batches that it has; None if that is not known.
        trained: Batches in committed steps, by the slot and incarnation that trained them.
        twice: Batches in several committed steps.
        never: Batches in none.

    """

    epoch: int
    num_tickets: int | None
    trained: dict[tuple[int, int], tuple[int, ...]]
    twice: tuple[int, ...]
    never: tuple[int, ...]

    def lines(self) -> list[str]:
        """Return it as text."""
        count = len(set(chain.from_iterable(self.trained.values())))
        size = "an unknown number" if self.num_tickets is None else str(self.num_tickets)
        told = [f"epoch {self.epoch}: {count} of {size} batches trained, twice {len(self.twice)}, never {len(self.never)}"]
        told += [f"  slot {slot}.{incarnation}: {ranges(own)}" for (slot, incarnation), own in sorted(self.trained.items())]
        told += [f"  {name}: {ranges(which)}" for name, which in (("twice", self.twice), ("never", self.never)) if which]
        return told


def prove(events: Iterable[Mapping[str, Any]]) -> list[EpochProof]:
    """Return the proof of each epoch.

    Args:
        events: Those of all ranks and of the supervisor, sorted by time; of several runs, if one resumed the other.

    """
    events = list(events)
    by_process: dict[int, dict[tuple[int, int], set[int]]] = {}
    for event in events:
        own = event.get("tickets", {}) if event["event"] in ("step", "accumulated") else {}
        tickets = own.get(event["slot"], own.get(str(event["slot"]), ()))
        if tickets:
            process = event["slot"], event["incarnation"]
            by_process.setdefault(event["epoch"], {}).setdefault(process, set()).update(tickets)
    return [
        EpochProof(
            epoch,
            found.num_tickets,
            {process: tuple(sorted(own)) for process, own in by_process.get(epoch, {}).items()},
            found.twice,
            found.never,
        )
        for epoch, found in sorted(audit(events).epochs.items())
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers compactly: ``0-8/2`` are 0, 2, 4, 6 and 8."""
    parts: list[str] = []
    rest = list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        length = 1
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if length == 2 and step > 1:
            length = 1
        first, last = rest[0], rest[length - 1]
        parts.append(f"{first}" if length == 1 else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        rest = rest[length:]
    return ", ".join(parts)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Describe the command ``lightning-ft data``."""
    parser.add_argument("where", type=Path, metavar="RUN", help=RUN)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    try:
        proofs = prove(read_events(find_run(arguments.where)))
    except FileNotFoundError as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"{line}\n" for proof in proofs for line in proof.lines()))
    if any(proof.twice or proof.never for proof in proofs):
        sys.exit(1)
