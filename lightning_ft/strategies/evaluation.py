"""Lets the samplers of validation, test and prediction follow the live membership from one pass to the next."""

import math
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop
from torch.utils.data import DistributedSampler


class EvaluationShards:
    """The samplers that Lightning put into evaluation loaders.

    Args:
        rank: Global rank now.
        world_size: Number of live ranks now.

    """

    def __init__(self) -> None:
        self._samplers: list[DistributedSampler[Any]] = []

    def add(self, loader: object) -> None:
        """Have the sampler of ``loader`` follow, if it is one of Lightning's."""
        self._samplers += distributed_samplers(loader)

    def follow(self, trainer: Trainer, rank: int, world_size: int) -> None:
        """Shard the next pass over ``world_size`` ranks; a pass under way keeps its shards."""
        for sampler in self._samplers:
            if sampler.num_replicas != world_size or sampler.rank != rank:
                reshard(sampler, rank, world_size)
        loop = trainer.fit_loop.epoch_loop.val_loop
        if loop._combined_loader is not None and loop._max_batches:
            _count_batches(trainer, loop)


def distributed_samplers(dataloader: object) -> list[DistributedSampler[Any]]:
    """Return the sampler that divides the data among the ranks, if there is one; a batch sampler may be around it."""
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    found = (getattr(dataloader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in found if isinstance(sampler, DistributedSampler)]


def reshard(sampler: DistributedSampler[Any], rank: int, world_size: int) -> None:
    """Have ``sampler`` yield the share of one rank, as if it had been made for it."""
    sampler.num_replicas, sampler.rank = world_size, rank
    if hasattr(sampler, "total_size") and type(sampler).__name__.startswith("Unrepeated"):
        length = len(sampler.dataset)  # type: ignore[arg-type]
        sampler.num_samples, sampler.total_size = len(range(rank, length, world_size)), length
        return
    length = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.num_samples = length // world_size if sampler.drop_last else math.ceil(length / world_size)
    sampler.total_size = sampler.num_samples * world_size


def _count_batches(trainer: Trainer, loop: _EvaluationLoop) -> None:
    limit = trainer.limit_val_batches
    assert loop._combined_loader is not None
    counts: list[int | float] = []
    for loader in loop._combined_loader.flattened:
        length = sized_len(loader)
        if length is None:  # a stream: Lightning counts it as endless, or as the limit says
            counts.append(limit if isinstance(limit, int) else float("inf"))
        else:
            counts.append(min(length, limit) if isinstance(limit, int) else int(length * limit))
    loop._max_batches = counts
