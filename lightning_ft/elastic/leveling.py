"""How the members of a new generation become level: everybody tells how far it is, whoever is behind gets what it lacks.

A rank that failed in an operation which others completed receives its result; a rank that joins receives the state of the
training. Nobody leaves before all are level.
"""

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ft.elastic.exchange import Exchange
from lightning_ft.elastic.groups import Group
from lightning_ft.elastic.state_codec import encode
from lightning_ft.elastic.transfer import StateServer, receive_state
from lightning_ft.elastic.vigil import Vigil
from lightning_ft.errors import GroupBrokenError, ReconfigurationError, StateUnavailableError
from lightning_ft.events.log import EventLog

log = logging.getLogger(__name__)

ProvideState = Callable[[Sequence[int]], Any]


class LeftBehind(GroupBrokenError):
    """The others went on while a rank was without a replica: it can't take part in a new one from where it stands.

    Args:
        is_this_one: Whether it is this rank.

    """

    def __init__(self, is_this_one: bool) -> None:
        self.is_this_one = is_this_one
        super().__init__("A rank without a replica was left behind.")


@dataclass(frozen=True)
class Standing:
    """What a member says of itself when a generation begins.

    Args:
        sequence: How many operations it completed.
        joining: Whether it has no state yet.
        at_top: Whether it waits at a step boundary, where the state is whole.

    """

    sequence: int
    joining: bool
    at_top: bool


@dataclass
class Outcome:
    """What a rank brought out of it.

    Args:
        replay: The result of the operation that failed here and was completed elsewhere, in a tuple.
        joined: Slots that were let in at the step boundary; None if this was none.
        state: What a joiner received, in a tuple.
        sequence: How many operations a joiner counts as completed.

    """

    replay: tuple[Any] | None = None
    joined: list[int] | None = None
    state: tuple[Any] | None = None
    sequence: int = 0


class Leveling:
    """One generation's members becoming level, seen from one of them.

    Args:
        group: Connects them.
        members: Their slots, by rank.
        rank: This rank.
        shards: Which shard of the state each of them holds.
        events: Where it is recorded.
        vigil: How to wait in it.

    """

    def __init__(
        self,
        group: Group,
        members: tuple[int, ...],
        rank: int,
        shards: Sequence[int],
        events: EventLog,
        vigil: Vigil,
    ) -> None:
        self._exchange = Exchange(group, rank, len(members), [])
        self._generation = vigil.generation
        self._members = members
        self._rank = rank
        self._shards = shards
        self._events = events
        self._vigil = vigil

    def run(self, mine: Standing, last: Any, provide_state: ProvideState | None) -> Outcome:
        """Collective. Return once all members are level.

        Args:
            mine: Where this rank stands.
            last: The result of the last operation that it completed.
            provide_state: Returns the state for joiners; needed at a step boundary.

        Raises:
            GroupBrokenError: If a member died meanwhile.
            LeftBehind: If a member is of no use.
            ReconfigurationError: If it can't be done.
            StateUnavailableError: If this rank joins, and there is no state for it.

        """
        outcome = Outcome()
        with StateServer(self._vigil) as server:
            row = torch.tensor([mine.sequence, mine.joining, mine.at_top, server.port, server.token])
            rows = [row.tolist() for row in self._exchange.all_gather(row)]
            table = [Standing(row[0], bool(row[1]), bool(row[2])) for row in rows]
            ports = [(row[3], row[4]) for row in rows]
            settled = [r for r, standing in enumerate(table) if not standing.joining]
            joiners = [r for r, standing in enumerate(table) if standing.joining]
            if settled:
                self._replay(table, ports, settled, last, server, outcome)
                if joiners:
                    self._hand_out(table, ports, joiners, provide_state, server, outcome)
            self._wait_for_all(outcome)
        return outcome

    def _wait_for_all(self, outcome: Outcome) -> None:
        try:
            self._exchange.all_reduce(torch.zeros(1))
        except GroupBrokenError:
            if outcome.state is None:
                raise
            # The others may be through, and past the step boundary: then nobody could hand out the state again. It is all
            # that this rank needs. That the group is broken it will meet again in the first operation of its own.

    def _replay(
        self,
        table: list[Standing],
        ports: list[tuple[int, int]],
        settled: list[int],
        last: Any,
        server: StateServer,
        outcome: Outcome,
    ) -> None:
        ahead = max(table[r].sequence for r in settled)
        behind = [r for r in settled if table[r].sequence < ahead]
        lagging = [r for r in behind if table[r].sequence < ahead - 1]
        if lagging and len(set(self._shards)) > 1:
            raise LeftBehind(self._rank in lagging)
        if any(table[r].sequence != ahead - 1 for r in behind):
            counts = [table[r].sequence for r in settled]
            reason = f"ranks completed {counts} operations; at most 1 apart expected"
            raise ReconfigurationError(self._generation, 1, reason)
        source = next(r for r in settled if table[r].sequence == ahead)
        if self._rank == source and behind:
            server.send(encode(last), len(behind))
        elif self._rank in behind:
            outcome.replay = (receive_state(self._vigil, *ports[source]),)

    def _hand_out(
        self,
        table: list[Standing],
        ports: list[tuple[int, int]],
        joiners: list[int],
        provide_state: ProvideState | None,
        server: StateServer,
        outcome: Outcome,
    ) -> None:
        hosts = [r for r, standing in enumerate(table) if standing.at_top]
        if not hosts:
            if self._rank in joiners:
                reason = "the others passed the step boundary before the state was handed over"
                raise ReconfigurationError(self._generation, 1, reason)
            return
        # Each receives its shard from one that holds the same, if there is one.
        sources = {j: next((h for h in hosts if self._shards[h] == self._shards[j]), hosts[0]) for j in joiners}
        receivers = [joiner for joiner, source in sources.items() if source == self._rank]
        missed = outcome.replay[0]["joined"] if table[self._rank].at_top and outcome.replay is not None else None
        outcome.joined = missed if missed is not None else [self._members[r] for r in joiners]
        if receivers:
            assert provide_state is not None
            self._send_state(outcome.joined, len(receivers), provide_state, server)
        elif self._rank in joiners:
            source = sources[self._rank]
            received = receive_state(self._vigil, *ports[source])
            if received["error"]:
                raise StateUnavailableError(source, received["error"])
            outcome.state, outcome.joined = (received["state"],), received["joined"]
            outcome.sequence = table[source].sequence + 1
            self._events.emit("healed", source=self._members[source])

    def _send_state(self, joined: list[int], count: int, provide_state: ProvideState, server: StateServer) -> None:
        started = time.monotonic()
        self._events.emit("handing_out", to=joined)
        try:
            encoded = encode({"joined": joined, "state": provide_state(joined), "error": ""})
        except Exception as exception:  # a callback's own code or state: the joiner fails of it, and shows it, not we
            log.warning("The state for slots %s could not be collected (%s).", joined, type(exception).__name__)
            error = "".join(traceback.format_exception(exception))
            encoded = encode({"joined": joined, "state": None, "error": error})
        server.send(encoded, count)
        elapsed = round(1e3 * (time.monotonic() - started), 2)
        num_bytes = len(encoded.header) + sum(storage.numel() for storage in encoded.storages)
        self._events.emit("handed_out", to=joined, bytes=num_bytes, ms=elapsed)
