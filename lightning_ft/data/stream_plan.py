"""Counts which batches of each slot's own stream were trained in an epoch; pure, and the same on every rank."""

import math
from collections.abc import Collection
from typing import Any

_STATE_VERSION = 1


class StreamPlan:
    """Knows how far every slot's stream is, so that a slot's next incarnation continues there.

    A stream has no length that could be relied on, and nobody but its slot can read it. What is dealt out is only the
    number of a batch: the ticket of batch ``i`` of slot ``s`` of ``R`` is ``i * R + s``.

    Args:
        num_slots: Slots that have a stream.

    """

    num_tickets: int | None = None
    """Unknown."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Put all streams to their start."""
        self.epoch = epoch
        self._done = [0] * self._num_slots
        self._in_flight: dict[int, int] = {}

    @property
    def in_flight(self) -> dict[int, int]:
        """How many batches were taken since the last commit, by slot."""
        return dict(self._in_flight)

    @property
    def is_untouched(self) -> bool:
        """Whether no batch of this epoch was taken."""
        return not any(self._done) and not self._in_flight

    def position(self, slot: int) -> int:
        """How many batches of its stream a slot has trained or has in flight."""
        return self._done[slot] + self._in_flight.get(slot, 0)

    def num_left(self, slot: int, cap: int | None) -> float:
        """How many further batches a slot may take, of ``cap`` in an epoch."""
        return math.inf if cap is None else max(0, cap - self.position(slot))

    def take(self, slots: Collection[int]) -> dict[int, int]:
        """Take the next batch on each of ``slots``; return their tickets."""
        tickets = {slot: self.position(slot) * self._num_slots + slot for slot in slots}
        for slot in slots:
            self._in_flight[slot] = self._in_flight.get(slot, 0) + 1
        return tickets

    def commit(self, contributors: Collection[int]) -> dict[int, list[int]]:
        """Mark what the contributors to a committed step have in flight as done; return it by contributor.

        What others have in flight was not trained. They are dead: their next incarnations begin with it.
        """
        done: dict[int, list[int]] = {}
        for slot in contributors:
            first, count = self._done[slot], self._in_flight.get(slot, 0)
            done[slot] = [index * self._num_slots + slot for index in range(first, first + count)]
            self._done[slot] += count
        self._in_flight.clear()
        return done

    def state_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {"version": _STATE_VERSION, "epoch": self.epoch, "done": list(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another plan was; what it had in flight was not trained.

        Raises:
            ValueError: If the state belongs to another number of slots or to another version of this class.

        """
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"`StreamPlan` state of version {state['version']} cannot be read: expected {_STATE_VERSION}.")
        if len(state["done"]) != self._num_slots:
            raise ValueError(
                f"`StreamPlan` state is of {len(state['done'])} streams, but there are {self._num_slots} now. In the middle"
                " of an epoch, resume on the same number of ranks."
            )
        self.epoch = state["epoch"]
        self._done = list(state["done"])
        self._in_flight = {}
