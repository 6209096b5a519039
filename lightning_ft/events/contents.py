"""Which batches are in which optimizer step: replayed event by event, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
Process = tuple[int, int, int]  # attempt, slot, incarnation
Place = int | tuple[int, int, int]  # a step, or attempt, epoch and number of a batch that was accumulated


_NUM_RECENT = 16


def process_of(event: Event) -> Process:
    """Return whose event it is."""
    return event.get("process") or (0, event["slot"], event["incarnation"])


@dataclass(frozen=True)
class Content:
    """What a step contains.

    Args:
        epoch: Which one its batches are of; None if it has none.
        tickets: Its batches.

    """

    epoch: int | None
    tickets: tuple[int, ...]


class Contents:
    """What each step contained, and the steps of which the ranks that went on say different things.

    A rank may die after it completed a reduction that the survivors had not completed yet: they run it again, among
    themselves, and that is what the training went on from. So what a rank says of its last batch before it died only
    counts if nobody else knows of it. Batches that were only accumulated are listed like steps.
    """

    def __init__(self) -> None:
        self._data = array("q")  # what was told, one after the other, each with its length before it
        self._steps = array("q")  # where in there a step is; 0: it was not told
        self._accumulated: dict[Place, int] = {}
        self._after: dict[Place, int] = {}  # the newest step when a batch was accumulated
        self._others: dict[Place, list[tuple[array[int], Process]]] = {}  # who said something else than the first
        self._tellers: dict[Process, list[int]] = {}  # the first and the last step of each
        self._tails: dict[Process, list[Place]] = {}  # places since the last one with batches
        self._recent: dict[Place, tuple[Any, Any, Any, array[int], bool]] = {}
        self._newest = 0
        self._tentative: list[Place] = []
        self._put(array("q"))  # so that no place is at 0

    def tell(self, event: Event) -> None:
        """Take in a step, or a batch that was accumulated."""
        process = process_of(event)
        is_step = event["event"] == "step"
        place: Place = event["step"] if is_step else (process[0], event["epoch"], event["batch"])
        packed, has_batches = self._pack(place, event)
        if is_step:
            step: int = event["step"]
            self._newest = max(self._newest, step)
            self._tellers.setdefault(process, [step, step])[1] = step
        else:
            self._after[place] = self._newest
        position = self._position(place)
        if not position:
            self._set_position(place, self._put(packed))
        elif self._get(position) != packed:
            self._others.setdefault(place, []).append((packed, process))
        if has_batches:
            self._tails[process] = [place]
        elif packed:
            self._tails.setdefault(process, []).append(place)

    def rewind(self, step: int, batch: int | None = None, attempt: int = 0) -> None:
        """Forget what came after ``step``: all ranks went back to it, or a later run resumed from it.

        Args:
            step: The newest that counts.
            batch: The newest batch that counts; None if that is not known.
            attempt: Whose batches are numbered so.

        """
        for number in range(step + 1, self._newest + 1):
            self._forget(number)
        self._newest = min(self._newest, step)
        for place, after in list(self._after.items()):
            assert isinstance(place, tuple)
            if after > step or (batch is not None and place[0] == attempt and place[2] > batch):
                self._forget(place)
            elif batch is None and after == step:
                self._tentative.append(place)

    def settle(self, died: Container[Process]) -> list[int]:
        """Decide what counts; return the steps of which ranks that went on say different things.

        Args:
            died: Those that ended otherwise than they should.

        """
        conflicts: list[int] = []
        for place in self._others:
            packed, is_conflict = self._judge(place, died)
            self._set_position(place, self._put(packed))
            if is_conflict and isinstance(place, int):
                conflicts.append(place)
        self._others.clear()
        self._settle_tentative()
        return sorted(conflicts)

    def items(self) -> Iterator[tuple[Place, Content]]:
        """Return what there is in each step and in each batch that was accumulated."""
        for step, position in enumerate(self._steps):
            if position:
                yield step, _unpack(self._get(position))
        for place, position in self._accumulated.items():
            yield place, _unpack(self._get(position))

    @property
    def steps(self) -> list[int]:
        """The steps, sorted."""
        return [step for step, position in enumerate(self._steps) if position]

    def _put(self, packed: array[int]) -> int:
        self._data.append(len(packed))
        self._data.extend(packed)
        return len(self._data) - len(packed) - 1

    def _get(self, position: int) -> array[int]:
        return self._data[position + 1 : position + 1 + self._data[position]]

    def _position(self, place: Place) -> int:
        if isinstance(place, tuple):
            return self._accumulated.get(place, 0)
        return self._steps[place] if place < len(self._steps) else 0

    def _set_position(self, place: Place, position: int) -> None:
        if isinstance(place, tuple):
            self._accumulated[place] = position
            return
        if place >= len(self._steps):
            self._steps.extend([0] * (place + 1 - len(self._steps)))
        self._steps[place] = position

    def _forget(self, place: Place) -> None:
        if isinstance(place, int):
            if place < len(self._steps):
                self._steps[place] = 0
        else:
            self._accumulated.pop(place, None)
            self._after.pop(place, None)
        self._others.pop(place, None)

    def _pack(self, place: Place, event: Event) -> tuple[array[int], bool]:
        """Return what an event says in few bytes, and whether there are batches in it."""
        epoch, tickets, members = event.get("epoch"), event.get("tickets"), event.get("members")
        recent = self._recent.get(place)
        if recent is not None and recent[0] == tickets and recent[1] == members and recent[2] == epoch:
            return recent[3], recent[4]
        packed, has_batches = _pack(epoch, tickets or {}, members or [])
        if len(self._recent) > _NUM_RECENT:
            self._recent.clear()
        self._recent[place] = tickets, members, epoch, packed, has_batches
        return packed, has_batches

    def _judge(self, place: Place, died: Container[Process]) -> tuple[array[int], bool]:
        """What counts of what several ranks say, and whether those that went on disagree."""
        others = self._others[place]
        elsewhere = {process for _, process in others}
        tellers = [(packed, process) for packed, process in others]
        first = self._get(self._position(place))
        if isinstance(place, int):
            known = [p for p, (begin, end) in self._tellers.items() if begin <= place <= end and p not in elsewhere]
            tellers = [(first, process) for process in known] + tellers
        went_on = [packed for packed, process in tellers if process not in died or place not in self._tails.get(process, ())]
        counting = went_on or [tellers[-1][0]]
        return counting[0], any(packed != counting[0] for packed in counting)

    def _settle_tentative(self) -> None:
        """What was accumulated just before or just after a checkpoint: if the later run trained it, only that counts."""
        tentative = {place for place in self._tentative if place in self._accumulated}
        if not tentative:
            return
        others = (content for place, content in self.items() if place not in tentative)
        trained = {(content.epoch, ticket) for content in others for ticket in content.tickets}
        for place in tentative:
            content = _unpack(self._get(self._accumulated[place]))
            if all((content.epoch, ticket) in trained for ticket in content.tickets):
                self._forget(place)


def _pack(epoch: int | None, tickets: Mapping[Any, list[int]], members: list[int]) -> tuple[array[int], bool]:
    if epoch is None:
        return array("q"), False
    numbers = [epoch, len(members), *members]
    size = len(numbers)
    for slot, own in sorted(tickets.items()):
        if own:
            numbers += (int(slot), len(own), *own)
    return array("q", numbers), len(numbers) > size


def _unpack(numbers: array[int]) -> Content:
    if not numbers:
        return Content(None, ())
    position = 2 + numbers[1]
    tickets: list[int] = []
    while position < len(numbers):
        count = numbers[position + 1]
        tickets += numbers[position + 2 : position + 2 + count]
        position += 2 + count
    return Content(numbers[0], tuple(tickets))
