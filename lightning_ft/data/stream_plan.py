"""Counts which batches of each stream were trained in an epoch, and who reads which; pure, and the same on every rank."""

import math
from collections.abc import Collection
from typing import Any

_STATE_VERSION = 2


class StreamPlan:
    """Knows how far every stream is, and which slot reads it.

    A stream has no length that could be relied on. Each slot reads its own; only a stream that nobody reads is given to a
    slot that is through with its own: it was that of a rank that is not there any more. What is dealt out is only the
    number of a batch: the ticket of batch ``i`` of stream ``s`` of ``R`` is ``i * R + s``.

    Args:
        num_slots: Slots that have a stream.

    """

    num_tickets: int | None = None
    """Unknown."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Put all streams to their start; each slot has its own."""
        self.epoch = epoch
        self._done = [0] * self._num_slots
        self._over: set[int] = set()
        self._forget_what_is_in_flight()
        self.deal()

    def deal(self) -> None:
        """Give each slot its own stream, as far as there is one which is not over."""
        own = range(self._num_slots)
        self._streams = {slot: slot if slot < self.num_streams and slot not in self._over else None for slot in own}

    @property
    def num_streams(self) -> int:
        """How many streams the epoch has; not as many as slots, if it was begun by another number of them."""
        return len(self._done)

    @property
    def in_flight(self) -> dict[int, list[int]]:
        """The tickets taken since the last commit, by slot."""
        return {slot: list(tickets) for slot, tickets in self._in_flight.items()}

    @property
    def is_untouched(self) -> bool:
        """Whether no batch of this epoch was taken."""
        return not any(self._done) and not self._in_flight

    def stream_of(self, slot: int) -> int | None:
        """Return which stream a slot reads."""
        return self._streams[slot]

    def is_over(self, stream: int) -> bool:
        """Whether all of a stream is trained."""
        return stream in self._over

    def position(self, stream: int) -> int:
        """How many batches of a stream are trained or in flight."""
        return self._done[stream] + sum(self._num_in_flight(slot, stream) for slot in self._in_flight)

    def num_left(self, stream: int, cap: int | None) -> float:
        """How many further batches of a stream may be taken, of ``cap`` in an epoch."""
        return math.inf if cap is None else max(0, cap - self.position(stream))

    def take(self, slots: Collection[int]) -> dict[int, int]:
        """Take the next batch of what each of ``slots`` reads; return their tickets."""
        tickets: dict[int, int] = {}
        for slot in slots:
            stream = self._streams[slot]
            assert stream is not None
            tickets[slot] = self.position(stream) * self.num_streams + stream
            self._in_flight.setdefault(slot, []).append(tickets[slot])
        return tickets

    def commit(self, contributors: Collection[int], ended: Collection[int] = ()) -> dict[int, list[int]]:
        """Mark what the contributors to a committed step have in flight as done; return it by contributor.

        What others have in flight was not trained. They are dead: who reads their streams next begins with it.

        Args:
            contributors: Slots whose gradients are in the step.
            ended: Those of them that have nothing left of what they read.

        """
        done = {slot: self._in_flight.get(slot, []) for slot in contributors}
        for slot, tickets in done.items():
            for ticket in tickets:
                self._done[ticket % self.num_streams] += 1
            self._over |= self._left.get(slot, set())
            stream = self._streams[slot]
            if slot in ended and stream is not None:
                self._over.add(stream)
        self._forget_what_is_in_flight()
        return done

    def without_reader(self, live: Collection[int], *, of_absent: bool) -> list[int]:
        """Return the streams that are not over and that no slot reads.

        Args:
            live: The slots that are there.
            of_absent: Whether to return those, too, that slots read which are not there.

        """
        read = {stream for slot, stream in self._streams.items() if slot in live or not of_absent}
        read |= {stream for slot, streams in self._left.items() if slot in live for stream in streams}
        return [stream for stream in range(self.num_streams) if stream not in self._over and stream not in read]

    def hand_over(self, idle: Collection[int], live: Collection[int], *, of_absent: bool) -> dict[int, int]:
        """Give each of the ``idle`` slots a stream that nobody reads, as far as there are any; return them by slot."""
        for slot in self._in_flight.keys() - set(live):  # was not trained
            del self._in_flight[slot]
            self._left.pop(slot, None)
        found = dict(zip(sorted(idle), self.without_reader(live, of_absent=of_absent), strict=False))
        for slot, stream in found.items():
            self._leave(slot)
            for other, read in self._streams.items():
                if read == stream:
                    self._streams[other] = None
            self._streams[slot] = stream
        return found

    def state_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "done": list(self._done),
            "over": sorted(self._over),
            "moved": [[slot, stream] for slot, stream in self._streams.items() if stream != slot],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where another plan was; what it had in flight was not trained.

        That plan may have had another number of slots, or slots that were away: then deal anew.

        Raises:
            ValueError: If the state belongs to another version of this class.

        """
        if state["version"] not in (1, _STATE_VERSION):
            raise ValueError(f"`StreamPlan` state of version {state['version']} cannot be read: expected {_STATE_VERSION}.")
        self.epoch = state["epoch"]
        self._done = list(state["done"])
        self._over = set(state.get("over", ()))
        self._forget_what_is_in_flight()
        self.deal()
        self._streams |= {slot: stream for slot, stream in state.get("moved", ()) if slot < self._num_slots}

    def _leave(self, slot: int) -> None:
        """Record that a slot found the end of what it reads; it is over once what it has of it in flight is trained."""
        stream = self._streams[slot]
        if stream is not None and self._num_in_flight(slot, stream):
            self._left.setdefault(slot, set()).add(stream)
        elif stream is not None:
            self._over.add(stream)

    def _num_in_flight(self, slot: int, stream: int) -> int:
        return sum(ticket % self.num_streams == stream for ticket in self._in_flight.get(slot, ()))

    def _forget_what_is_in_flight(self) -> None:
        self._in_flight: dict[int, list[int]] = {}
        self._left: dict[int, set[int]] = {}
