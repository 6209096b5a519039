"""Validation, test and prediction of a sharded module, also where ranks have different numbers of batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.sharding.apply import ShardedModule
from lightning_ft.strategies.live_training import LiveTraining
from lightning_ft.strategies.step_traces import StepTraces


class ShardedEvaluation:
    """The evaluation steps of one Trainer call.

    Parameters are gathered for each step by all ranks of a replica together. Where some have more steps than others
    (prediction repeats no samples, streams are of any length) they are gathered once, for the whole pass. So they are
    where what is left of replicas has become one: its ranks may be at different batches.

    Args:
        live: The Trainer call.
        sharded: Its module.
        engine: Of the job.
        collectives: Of the live ranks.
        can_regroup: Whether ranks that lost their replica may hold every shard together.

    """

    def __init__(
        self,
        live: LiveTraining,
        sharded: ShardedModule,
        engine: Engine,
        collectives: Collectives,
        *,
        can_regroup: bool,
    ) -> None:
        self._live = live
        self._trainer: Trainer = live.trainer
        self._sharded = sharded
        self._engine = engine
        self._collectives = collectives
        self._can_regroup = can_regroup
        self._is_uneven = False

    def begin(self) -> None:
        """Collective. Before the first step of a pass.

        Raises:
            MisconfigurationException: If ranks that share batches have different numbers of them.

        """
        counts = torch.tensor(self._num_batches(), dtype=torch.float64)
        gathered = self._collectives.all_gather_ragged(counts)
        self._check_rows(gathered)
        if torch.isinf(counts).any() or any(not torch.equal(row, counts) for row in gathered):
            self._gather_for_the_pass()
            if not counts.any():
                self.end()

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Collective in the replica, unless ranks have different numbers of batches. Run one step."""
        run = partial(self._run, name, *args, **kwargs)
        output = run() if self._is_uneven or not self._can_regroup else self._run_in_any_replica(run)
        if not self._is_uneven or self._loop.batch_progress.is_last_batch:
            self.end()
        return output

    def end(self) -> None:
        """Parameters may change from now on. May be called twice."""
        if self._is_uneven:
            self._is_uneven = False
            self._sharded.release()
        self._sharded.let_go()

    def _check_rows(self, gathered: list[torch.Tensor]) -> None:
        rows = self._engine.rows
        if rows is None:
            return
        of_row: dict[int, torch.Tensor] = {}
        for slot, counts in zip(self._engine.members, gathered, strict=True):
            expected = of_row.setdefault(slot // rows.size, counts)
            if not torch.equal(expected, counts):
                call = self._trainer.state.fn
                assert call is not None
                raise MisconfigurationException(
                    f"`FTStrategy(tensor_parallel_size={rows.size})`: ranks that work on the same batches have different"
                    f" numbers of them in `trainer.{call.value}`: {expected.tolist()} and {counts.tolist()}"
                    f" (slot {slot}). Let a loader that reads for its rank alone take"
                    ' `self.device_mesh["data_parallel"].get_local_rank()` instead of the global rank.'
                )

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._live.preemption.before_evaluation_batch(self._agree)
        if name == "validation_step" and self._live.buffers is not None:
            self._live.buffers.before_forward(synchronize_gradients=False)
        return self._sharded.call(name, *args, **kwargs)

    def _run_in_any_replica(self, run: Callable[[], Any]) -> Any:
        """Run a step; if the replica is lost in it, begin again once this rank is part of another one."""
        replica, buffers = self._engine.replica, self._live.buffers
        sends_buffers = buffers is not None and buffers.due
        traces = StepTraces(self._loop._results, self._trainer.lightning_module)

        def begin() -> Any:
            if self._engine.replica != replica:
                self._gather_for_the_pass()
            return run()

        def undo() -> None:
            if not self._live.may_pause():  # of the window under way, there are gradients that go with the replica
                self._engine.retire()
            self._sharded.recover()
            traces.undo()
            if buffers is not None:
                buffers.due = sends_buffers

        return self._engine.redo(begin, undo)

    def _gather_for_the_pass(self) -> None:
        """Collective in the replica."""
        self._is_uneven = True
        self._sharded.hold()

    def _agree(self, number: int) -> int:
        """Collective among those who run this step together. Return the largest number that any has."""
        rows = self._engine.rows
        group = self._engine.shard_group if not self._is_uneven else None if rows is None else rows.row
        if group is None or self._engine.replica.size == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest)

    @property
    def _loop(self) -> Any:
        trainer: Any = self._trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def _num_batches(self) -> list[float]:
        return [float(count) for count in self._loop.max_batches]
