"""The position of one rank in a corpus that makes its batches from the number of the epoch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Protocol


class Corpus(Protocol):
    """Makes the same batches for an epoch whenever it is asked."""

    def epoch_batches(self, epoch: int) -> Iterable[Any]:
        """Return the batches of this rank in an epoch; as a sequence, if any of them can be made by itself."""


@dataclass(frozen=True)
class LoaderState:
    """How far one rank is.

    Args:
        seed: From which the order is drawn.
        epoch: The epoch under way.
        rank: Whose batches these are.
        world_size: Among how many ranks the corpus is divided.
        batch_idx: How many batches of the epoch are trained.

    Raises:
        TypeError: If an argument is no integer.
        ValueError: If one is negative, or ``rank`` is not below ``world_size``.

    """

    seed: int
    epoch: int
    rank: int
    world_size: int
    batch_idx: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int:
                raise TypeError(f"`LoaderState({name}={value!r})` is not valid: expected an integer.")
            if value < 0 and name != "seed":
                raise ValueError(f"`LoaderState({name}={value})` is not valid: expected 0 or more.")
        if self.rank >= self.world_size:
            raise ValueError(
                f"`LoaderState(rank={self.rank}, world_size={self.world_size})` is not valid: expected a rank below the"
                " world size."
            )

    def advanced(self, num_batches: int) -> "LoaderState":
        """Return the state ``num_batches`` later in the same epoch."""
        return replace(self, batch_idx=self.batch_idx + num_batches)

    def to_dict(self) -> dict[str, int]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, int]) -> "LoaderState":
        """Return what :meth:`to_dict` described."""
        return cls(**state)


def resume_batches(corpus: Corpus, state: LoaderState) -> Iterator[Any]:
    """Return the batches of ``corpus`` that are left of the epoch; what is trained is not made if it is a sequence.

    Args:
        corpus: The corpus of the rank that the state is of.
        state: Where to begin.

    Raises:
        ValueError: If the corpus says that it has another seed, rank or world size.

    """
    for name in ("seed", "rank", "world_size"):
        own = getattr(corpus, name, None)
        if own is not None and own != getattr(state, name):
            raise ValueError(
                f"The position is of a corpus with {name}={getattr(state, name)}, but this one has {name}={own}. Make it as"
                " it was when the position was saved."
            )
    return skip_trained(corpus.epoch_batches(state.epoch), state.batch_idx)


def skip_trained(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Return ``batches`` without the first ``count``; of a sequence, these are not even made."""
    if isinstance(batches, Sequence):
        return (batches[index] for index in range(count, len(batches)))
    return islice(iter(batches), count, None)
