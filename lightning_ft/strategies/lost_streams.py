"""Ends a job, on all ranks alike, rather than an epoch in which a stream was not read to its end."""

from collections.abc import Mapping

from lightning.pytorch.utilities.exceptions import SIGTERMException


class StreamsLostExit(SIGTERMException):
    """Ends the call as a job ends that is asked to: with one checkpoint, from which the epoch goes on; but with code 1.

    Args:
        epoch: The epoch.
        left: How many batches of each stream are not trained, where that is known.

    """

    def __init__(self, epoch: int, left: Mapping[int, int | None]) -> None:
        super().__init__(1)
        self.epoch = epoch
        self.left = dict(left)

    def __str__(self) -> str:
        """Return what was lost, and what to do."""
        return (
            f"epoch {self.epoch} lacks {describe_left(self.left)}, and `SupervisionOptions(lost_streams='stop')` does not"
            " let it end without them. Resume on as many ranks: the epoch goes on there"
        )


def describe_left(left: Mapping[int, int | None]) -> str:
    """Return how many batches of which slots there are."""
    parts = (f"{'an unknown number' if n is None else n} of slot {slot}" for slot, n in left.items())
    return f"batches of streams whose slots are not back: {', '.join(parts)}"
