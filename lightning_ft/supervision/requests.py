"""What a user may ask for while a job runs, and why it is refused: pure."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lightning_ft.supervision.roster import Roster

FAULTS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "abort": signal.SIGABRT,
    "segfault": signal.SIGSEGV,
}
"""Faults for a drill, as the signals that cause them."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        command: ``"suspend"``: end a slot's process and start none until ``"resume"``; ``"exclude"``: end it and start it
            again, as for a rank that is not trusted; ``"fault"``: let something happen to it.
        slot: Whom it concerns.
        kind: For a fault, a key of :data:`FAULTS`.

    """

    command: str
    slot: object
    kind: object = None

    def refusal(
        self,
        roster: Roster,
        members: Collection[int],
        suspended: Collection[int],
        num_slots: int,
        shard_size: int | Literal["all"],
    ) -> str | None:
        """Return why it can't be done, or None."""
        slot = self.slot
        if self.command not in ("suspend", "resume", "exclude", "fault"):
            return f"`{self.command}` is no command"
        if not isinstance(slot, int) or not 0 <= slot < num_slots:
            return f"there is no slot {slot}; expected one of 0 to {num_slots - 1}"
        if self.command == "resume":
            return None if slot in suspended else f"slot {slot} is not suspended"
        if self.command == "fault" and self.kind not in FAULTS:
            return f"`{self.kind}` is no fault; expected one of {', '.join(FAULTS)}"
        rank = roster.ranks.get(slot)
        if slot in suspended or rank is None or rank.killed:
            return f"slot {slot} has no process now"
        num_needed = 1 if shard_size == "all" else shard_size  # what the death of one takes away
        if not members:
            return "no Trainer call is running"
        if slot in members and len(members) <= num_needed:
            return f"without slot {slot} nobody would be left who holds the state"
        return None


def status(roster: Roster, members: Collection[int], suspended: Collection[int], num_slots: int) -> list[dict[str, object]]:
    """Return what each slot does."""
    rows: list[dict[str, object]] = []
    for slot in range(num_slots):
        rank = roster.ranks.get(slot)
        if rank is None:
            rows.append({"slot": slot, "state": "suspended" if slot in suspended else "away"})
            continue
        state = "ending" if rank.killed or rank.raised is not None else rank.phase.name.lower()
        row = {"slot": slot, "state": state, "pid": rank.pid, "incarnation": rank.incarnation}
        rows.append(row | ({"rank": list(members).index(slot)} if slot in members else {}))
    return rows
