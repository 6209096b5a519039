"""What a batch took, without what is counted by itself, and what of it was the forward pass."""

import time
from collections.abc import Callable


class BatchClock:
    """Adds up the times of the batches of a step.

    Args:
        clock: Returns the time, in seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._aside = 0.0
        self._aside_since: float | None = None
        self._forward_since: float | None = None
        self.seconds = 0.0
        """Of the batches since :meth:`take`, from the end of one to the end of the next."""
        self.forward = 0.0
        """Of them, the forward passes."""

    def start(self) -> None:
        """The first batch begins."""
        self._since, self._aside = self._clock(), 0.0
        self.clear()

    def clear(self) -> None:
        """The batches of a step are complete, or are not to be counted."""
        self.seconds = self.forward = 0.0

    def begin_forward(self) -> None:
        """A forward pass begins."""
        self._forward_since = self._clock()

    def end_forward(self) -> None:
        """It is over; also if it never began."""
        if self._forward_since is not None:
            self.forward += self._clock() - self._forward_since
            self._forward_since = None

    def begin_aside(self) -> None:
        """Something begins that is not part of a batch."""
        self._aside_since = self._clock()

    def end_aside(self) -> None:
        """It is over."""
        if self._aside_since is not None:
            self._aside += self._clock() - self._aside_since
            self._aside_since = None

    def end_batch(self, aside: float = 0.0) -> None:
        """A batch is over.

        Args:
            aside: Further seconds since the batch before that are no part of it.

        """
        now = self._clock()
        self.seconds += max(0.0, now - self._since - self._aside - aside)
        self._since, self._aside = now, 0.0
