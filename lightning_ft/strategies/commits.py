"""Which batches are in which optimizer step, told to the event log.

A batch is trained once an average that contains its gradient is taken, and never again: should its rank die before a later
backward pass of the same batch, the others go on without it. The event of the next optimizer step names the batch, so one
that makes several steps is named by the first of them, and one that only accumulates by an event of its own.
"""

from collections.abc import Sequence
from typing import Any

from lightning_ft.events.log import EventLog


class Commits:
    """Tells what each optimizer step contains.

    Args:
        events: Where it is recorded.

    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._content: dict[str, Any] = {}
        self.untold = False
        """Whether the steps are none of the training's, which the event log is about."""

    def averaged(self, epoch: int, tickets: dict[int, list[int]], members: Sequence[int]) -> None:
        """Take in what a reduction contains.

        Args:
            epoch: Which one it belongs to.
            tickets: That are done with it, by slot; empty for a later reduction of the same batch.
            members: The slots that took part.

        """
        merged = dict(self._content.get("tickets", {}))
        for slot, numbers in tickets.items():
            merged[slot] = [*merged.get(slot, []), *numbers]
        self._content = {"epoch": epoch, "tickets": merged, "members": list(members)}

    def leave(self, members: Sequence[int]) -> list[int]:
        """Leave only ``members`` in the average that no optimizer step took up yet; return the others' tickets in it."""
        tickets = self._content.get("tickets", {})
        self._content = {**self._content, "tickets": {slot: n for slot, n in tickets.items() if slot in members}}
        return [number for slot in sorted(tickets) if slot not in members for number in tickets[slot]]

    def stepped(self, step: int) -> None:
        """Record an optimizer step with what was averaged since the last one."""
        if not self.untold:
            self._events.emit("step", step=step, **self._content)
        self._clear()

    def end_batch(self, batch: int) -> None:
        """Record what no optimizer step of the batch took up: it was accumulated, or there was nothing to train."""
        if any(self._content.get("tickets", {}).values()) and not self.untold:
            self._events.emit("accumulated", batch=batch, **self._content)
        self._clear()

    def abandon(self) -> None:
        """Forget a batch that failed before its step was committed."""
        self._content = {}

    def _clear(self) -> None:
        if self._content:
            self._content = {**self._content, "tickets": {}}
