"""How the ranks that save together talk: little, through a store, and never by a collective that waits for a slow disk."""

import contextlib
import secrets
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import Store

from lightning_ft.checkpoint.plan import Seat


@dataclass(frozen=True)
class Roll:
    """Who takes part in one save.

    Args:
        token: The same on all ranks, and another one for every save.
        seat: Where this rank is among them.
        ids: What :class:`Peers` tells the ranks apart by, in their order.

    """

    token: str
    seat: Seat
    ids: tuple[tuple[int, int], ...] = ()


class Peers(Protocol):
    """The ranks that save together. All methods but :meth:`enroll` may be called from any thread, and return at once."""

    def enroll(self) -> Roll | None:
        """Collective, though not all implementations wait. Agree on who takes part in the next save; None: not this rank."""

    def post(self, key: str, value: bytes) -> None:
        """Let the others see a value."""

    def peek(self, key: str) -> bytes | None:
        """Return what was posted, or None."""

    def forget(self, key: str) -> None:
        """Remove what this rank posted and nobody looks for any more."""

    def lost(self, roll: Roll) -> frozenset[int]:
        """Return the positions of those in ``roll`` that died since they enrolled."""


class SoloPeers:
    """A process that saves alone."""

    def __init__(self) -> None:
        self._posts: dict[str, bytes] = {}

    def enroll(self) -> Roll:
        return Roll(secrets.token_hex(4), Seat(0, 1))

    def post(self, key: str, value: bytes) -> None:
        self._posts[key] = value

    def peek(self, key: str) -> bytes | None:
        return self._posts.get(key)

    def forget(self, key: str) -> None:
        self._posts.pop(key, None)

    def lost(self, roll: Roll) -> frozenset[int]:
        return frozenset()


class StorePeers:
    """Ranks that live and die together, with a store of torch between them.

    Args:
        store: A connection that nothing waits in.
        rank: Of this process.
        world_size: Number of ranks.
        run_id: The same on all ranks, and another one for every set of ranks that uses the store.

    """

    def __init__(self, store: Store, rank: int, world_size: int, run_id: str) -> None:
        self._store = store
        self._seat = Seat(rank, world_size)
        self._run_id = run_id
        self._count = 0

    def enroll(self) -> Roll | None:
        self._count += 1
        return Roll(f"{self._run_id}-{self._count}", self._seat)

    def post(self, key: str, value: bytes) -> None:
        self._store.set(f"lightning_ft/{key}", value)  # type: ignore[arg-type]

    def peek(self, key: str) -> bytes | None:
        key = f"lightning_ft/{key}"
        return self._store.get(key) if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # a store that can't
            self._store.delete_key(f"lightning_ft/{key}")

    def lost(self, roll: Roll) -> frozenset[int]:
        return frozenset()
