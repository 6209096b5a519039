"""A ``DistributedSampler`` seen as that of another rank, or of a job of another size."""

from typing import Any

from torch.utils.data import DistributedSampler


class as_replica:
    """Makes a ``DistributedSampler`` yield what one of ``num_replicas`` has of its order, unpadded, for a while."""

    def __init__(self, sampler: Any, rank: int, num_replicas: int) -> None:
        self._sampler = sampler
        self._rank = rank
        self._num_replicas = num_replicas

    def __enter__(self) -> None:
        if isinstance(self._sampler, DistributedSampler):
            self._saved = {k: getattr(self._sampler, k) for k in ("num_replicas", "rank", "num_samples", "total_size")}
            length = full_length(self._sampler)
            self._sampler.num_replicas, self._sampler.rank = self._num_replicas, self._rank
            self._sampler.num_samples = len(range(self._rank, length, self._num_replicas))
            self._sampler.total_size = length

    def __exit__(self, *exc_info: object) -> None:
        if isinstance(self._sampler, DistributedSampler):
            vars(self._sampler).update(self._saved)


def full_length(sampler: Any) -> int:
    """How many samples all ranks have together, none repeated."""
    return len(sampler.dataset if isinstance(sampler, DistributedSampler) else sampler)  # type: ignore[arg-type]
