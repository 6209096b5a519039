"""What `TicketPlan` promises, told with lists of tickets that are written out: as plain as it can be, and slow."""

from collections.abc import Collection
from itertools import chain


class WrittenOutPlan:
    """Every slot has a list of tickets of its own, from the front of which it takes."""

    def __init__(self, num_tickets: int, num_slots: int) -> None:
        self.num_tickets = num_tickets
        self.num_slots = num_slots
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.round = 0
        self.streams = {slot: list(range(slot, self.num_tickets, self.num_slots)) for slot in range(self.num_slots)}
        self.returned: list[int] = []
        self.held: dict[int, list[tuple[int, int]]] = {}
        """What each slot has in flight, and of which round it is."""

    @property
    def in_flight(self) -> dict[int, list[int]]:
        return {slot: [ticket for ticket, _ in held] for slot, held in self.held.items()}

    def open_tickets(self) -> list[int]:
        return [*chain.from_iterable(self.streams.values()), *self.returned]

    def upcoming(self, slot: int) -> list[int]:
        return self.streams.get(slot, [])

    def remaining_steps(self, live: Collection[int]) -> int:
        orphaned = sum(len(held) for slot, held in self.held.items() if slot not in live)
        return -(-(len(self.open_tickets()) + orphaned) // len(live))

    def take(self, live: list[int]) -> dict[int, int | None]:
        for slot in sorted(self.held.keys() - set(live)):
            self.remove(slot)
        num_open = len(self.open_tickets())
        if not num_open:
            return {}
        left = [len(self.streams.get(slot, [])) for slot in live]
        if min(left) == 0 and (sum(left) < num_open or max(left) > -(-num_open // len(live))):
            tickets, self.returned = self.open_tickets(), []
            self.streams = {slot: tickets[index :: len(live)] for index, slot in enumerate(sorted(live))}
            self.round += 1
        taken = {slot: self.streams[slot].pop(0) if self.streams.get(slot) else None for slot in live}
        for slot, ticket in taken.items():
            if ticket is not None:
                self.held.setdefault(slot, []).append((ticket, self.round))
        return taken

    def commit(self, contributors: Collection[int]) -> dict[int, list[int]]:
        done = {slot: [ticket for ticket, _ in self.held.pop(slot, [])] for slot in contributors}
        for _, held in sorted(self.held.items()):
            self.reopen([ticket for ticket, _ in held])
        self.held = {}
        return done

    def reopen(self, tickets: Collection[int]) -> None:
        self.returned += tickets

    def remove(self, slot: int) -> None:
        held = self.held.pop(slot, [])
        self.reopen([ticket for ticket, number in held if number != self.round])
        self.streams.get(slot, [])[:0] = [ticket for ticket, number in held if number == self.round]

    add = remove
