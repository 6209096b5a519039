"""How a rank waits for others: until they come, their generation is over, or far too long; the supervisor hears of it."""

import time
from collections.abc import Callable

from lightning_ft.elastic.protocol import FromRank
from lightning_ft.errors import GroupBrokenError

SLICE = 0.05  # seconds; waits are cut into slices of this length


class Vigil:
    """One generation, for those who wait in it.

    The supervisor is told once a wait has lasted for a while, and when it is over: whoever does not wait then is late.

    Args:
        generation: Its number.
        superseded: Whether there is a newer one.
        tell: Sends to the supervisor.
        after: Seconds of waiting after which the supervisor is told.
        timeout: Seconds of waiting after which this rank gives up by itself. The supervisor acts long before.

    """

    def __init__(
        self, generation: int, superseded: Callable[[], bool], tell: Callable[[FromRank], None], after: float, timeout: float
    ) -> None:
        self.generation = generation
        self.timeout = timeout
        self._superseded = superseded
        self._tell = tell
        self._after = after
        self._since: float | None = None
        self._told = False

    def still_waiting(self, what: str) -> None:
        """Another slice of waiting for ``what`` is over.

        Raises:
            GroupBrokenError: If there is no point in waiting on.

        """
        if self._superseded():
            raise GroupBrokenError(f"A newer generation came while this rank waited for {what}.")
        now = time.monotonic()
        self._since = now - SLICE if self._since is None else self._since
        waited = now - self._since
        if waited >= self.timeout:
            raise GroupBrokenError(f"This rank waited {waited:.0f} s for {what} and gave up.")
        if not self._told and waited >= self._after:
            self._told = True
            self._tell({"type": "waiting", "generation": self.generation, "seconds": waited})

    def arrived(self) -> None:
        """What was waited for is there."""
        self._since = None
        if self._told:
            self._told = False
            self._tell({"type": "arrived", "generation": self.generation})


class VigilOfReplica(Vigil):
    """How a rank waits for the others of its replica, whose group outlives generations.

    It takes part in changes meanwhile: those it waits for may be behind by the operation whose result it has, and everybody
    waits for it before they get that.

    Args:
        timeout: As in :class:`Vigil`.
        current: Returns how to wait in the generation that there is.
        follow: Goes over to a newer generation if there is one.

    """

    def __init__(self, timeout: float, current: Callable[[], Vigil], follow: Callable[[], bool]) -> None:
        super().__init__(-1, lambda: False, lambda message: None, timeout, timeout)
        self._current = current
        self._follow = follow

    def still_waiting(self, what: str) -> None:
        """Another slice of waiting is over."""
        if not self._follow():
            self._current().still_waiting(what)

    def arrived(self) -> None:
        """What was waited for is there."""
        self._current().arrived()
