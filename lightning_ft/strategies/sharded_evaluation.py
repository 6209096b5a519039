"""Validation, test and prediction of a sharded module, also where ranks have different numbers of batches."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.shard_group import ShardGroup
from lightning_ft.sharding.apply import ShardedModule


class ShardedEvaluation:
    """The evaluation steps of one Trainer call.

    Parameters are gathered for each step by all ranks of a replica together. Where some have more steps than others
    (prediction repeats no samples, streams are of any length) they are gathered once, for the whole pass.

    Args:
        trainer: The trainer.
        sharded: Its module.
        collectives: Of the live ranks.
        group: Of the replica.

    """

    def __init__(self, trainer: Trainer, sharded: ShardedModule, collectives: Collectives, group: ShardGroup) -> None:
        self._trainer = trainer
        self._sharded = sharded
        self._collectives = collectives
        self._group = group
        self._is_uneven = False

    def begin(self) -> None:
        """Collective. Before the first step of a pass."""
        counts = torch.tensor(self._num_batches(), dtype=torch.float64)
        gathered = self._collectives.all_gather_ragged(counts)
        self._is_uneven = bool(torch.isinf(counts).any()) or any(not torch.equal(row, counts) for row in gathered)
        if self._is_uneven:
            self._sharded.hold()
            if not counts.any():
                self.end()

    def agree(self, number: int) -> int:
        """Collective in the replica, as a step is. Return the largest number that any rank has which is in the step."""
        if self._is_uneven or self._group.size() == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        return int(largest)

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Collective in the replica, unless ranks have different numbers of batches. Run one step."""
        output = self._sharded.call(name, *args, **kwargs)
        if not self._is_uneven or self._loop.batch_progress.is_last_batch:
            self.end()
        return output

    def end(self) -> None:
        """Parameters may change from now on. May be called twice."""
        if self._is_uneven:
            self._is_uneven = False
            self._sharded.release()
        self._sharded.let_go()

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def _num_batches(self) -> list[float]:
        return [float(count) for count in self._loop.max_batches]
