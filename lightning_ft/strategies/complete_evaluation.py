"""Validation and test to which a death costs nothing: the others evaluate the dead rank's share before metrics are reduced.

All of its share, since what it had evaluated was lost with it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _EvaluationLoop
from torch.utils.data import DataLoader

from lightning_ft.data.shares import Batch, EvaluationShares
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.events.log import EventLog
from lightning_ft.strategies.evaluation import distributed_samplers, reshard
from lightning_ft.strategies.ghost import GhostSteps

log = logging.getLogger(__name__)


class CompleteEvaluation:
    """The passes of one evaluation loop.

    Where only the dead rank can read its share (iterable datasets, `use_distributed_sampler=False`), and where it dies while
    the values are being reduced, they are told to be incomplete: by a warning, and by the event ``incomplete``.

    Args:
        trainer: The trainer.
        loop: The loop.
        engine: Knows the membership.
        events: Where it is recorded.
        ghosts: Makes steps leave no trace that a rank takes for the sake of the others' collectives only.
        slots: Returns those among which a pass is divided.
        is_sending: Returns whether the next step sends buffers before anything of the module's own.

    """

    def __init__(
        self,
        trainer: Trainer,
        loop: _EvaluationLoop,
        *,
        engine: Engine,
        events: EventLog,
        ghosts: GhostSteps,
        slots: Callable[[], tuple[int, ...]],
        is_sending: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._loop = loop
        self._engine = engine
        self._events = events
        self._ghosts = ghosts
        self._slots = slots
        self._is_sending = is_sending
        self._members: tuple[int, ...] = ()
        self._dataloader_idx = self._num_batches = 0
        self._has_collectives = False

    def watch(self) -> None:
        """Have the loop's passes completed."""
        loop, kind = self._loop, type(self._loop)  # not what an earlier call of the trainer put there
        reset, step = kind.reset.__get__(loop), kind._evaluation_step.__get__(loop)
        store, end = kind._store_dataloader_outputs.__get__(loop), kind._on_evaluation_end.__get__(loop)

        def begin_pass() -> None:
            self._members = self._slots()
            self._has_collectives = False
            reset()

        def run_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            self._dataloader_idx, self._num_batches = dataloader_idx, batch_idx + 1
            before = self._engine.completed + self._is_sending()
            step(batch, batch_idx, dataloader_idx, dataloader_iter)
            self._has_collectives = self._has_collectives or self._engine.completed != before

        def store_outputs() -> None:
            if not self._engine.alone and not self._trainer.sanity_checking and self._is_readable:
                self._complete(step)
            store()

        def end_evaluation(*args: Any, **kwargs: Any) -> None:
            if gone := sorted(set(self._members) - set(self._engine.members)):
                self._tell_incomplete(gone)
            end(*args, **kwargs)

        loop.reset = begin_pass  # type: ignore[method-assign]
        loop._evaluation_step = run_step  # type: ignore[method-assign]
        loop._store_dataloader_outputs = store_outputs  # type: ignore[method-assign]
        loop._on_evaluation_end = end_evaluation  # type: ignore[method-assign]

    @property
    def _is_readable(self) -> bool:
        """Whether every rank can read every rank's share; the same on all ranks."""
        assert self._loop._combined_loader is not None
        return self._loop._is_sequential and all(map(_is_divided, self._loop._combined_loader.flattened))

    def _complete(self, step: Callable[..., None]) -> None:
        """Collective, at the end of a loader. Return once every batch was evaluated by a rank that lives."""
        assert self._loop._combined_loader is not None
        divided = self._slots()
        index = self._dataloader_idx
        loader, limit = self._loop._combined_loader.flattened[index], self._loop.max_batches[index]
        members, has_collectives = self._agree()
        holders = divided
        shares: EvaluationShares | None = None
        while not set(holders) <= set(members):
            if shares is None:
                batches = {slot: _share(loader, divided.index(slot), len(divided), limit) for slot in divided}
                shares = EvaluationShares({slot: len(share) for slot, share in batches.items()})
            turns = shares.hand_over(members)
            mine = [turn[self._engine.slot] for turn in turns]
            own: list[Batch] = [batch for batch in mine if batch is not None]
            log.info("Evaluating %s batches of slots that died.", len(own))
            # All ranks take equally many steps if they call collectives in them; only the last turn is uneven.
            idle = [turn for turn in turns if turn[self._engine.slot] is None and has_collectives]
            spare = [next(other for other in turn.values() if other is not None) for turn in idle]
            contents = [batches[slot][number] for slot, number in (*own, *spare)]
            self._run(step, loader, contents, len(own))
            holders = members
            members, has_collectives = self._agree()
        self._members = members

    def _run(self, step: Callable[..., None], loader: Any, batches: Sequence[Any], num_own: int) -> None:
        progress = self._loop.batch_progress
        kept = progress.state_dict()
        with torch.random.fork_rng(devices=[]):  # a loader draws a number that training is not to miss
            iterator: Iterator[Any] = iter(_reader(loader, batches)) if batches else iter(())
        for number, batch in enumerate(iterator):
            with nullcontext() if number < num_own else self._ghosts.step():
                step(batch, self._num_batches, self._dataloader_idx, None)
            self._num_batches += 1
        progress.load_state_dict(kept)

    def _agree(self) -> tuple[tuple[int, ...], bool]:
        """Collective. Return who lives, and whether evaluation steps call collectives."""

        def body(exchange: Exchange) -> dict[str, Any]:
            return {"members": list(self._engine.members), "inside": any(row[0] for row in exchange.inline)}

        result = self._engine.run("end of an evaluation share", body, inline=bytes([self._has_collectives]))
        return tuple(result["members"]), result["inside"]

    def _tell_incomplete(self, slots: list[int]) -> None:
        stage = self._trainer.state.stage
        name = "evaluation" if stage is None else stage.value
        step = self._trainer.global_step
        self._events.emit("incomplete", stage=name, step=step, slots=slots)
        if self._engine.rank == 0:
            names = ", ".join(map(str, slots))
            log.warning("The values of %s after step %s are incomplete: the share of slot %s is missing.", name, step, names)


def _is_divided(loader: object) -> bool:
    return isinstance(loader, DataLoader) and bool(distributed_samplers(loader))


def _share(loader: Any, rank: int, world_size: int, limit: float) -> list[Any]:
    """Return what a rank's batches consist of."""
    samplers = distributed_samplers(loader)
    before = [(sampler.rank, sampler.num_replicas) for sampler in samplers]
    try:
        for sampler in samplers:
            reshard(sampler, rank, world_size)
        batches = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        return list(batches if limit == float("inf") else islice(batches, int(limit)))
    finally:
        for sampler, (own_rank, own_size) in zip(samplers, before, strict=True):
            reshard(sampler, own_rank, own_size)


def _reader(loader: DataLoader[Any], batches: Sequence[Any]) -> DataLoader[Any]:
    """Return a loader of these batches that is like ``loader`` otherwise."""
    sampling: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        sampling = {"batch_size": None, "sampler": batches}
    return DataLoader(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
