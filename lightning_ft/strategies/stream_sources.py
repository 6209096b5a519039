"""Finds the stream of any rank: this one's own, and that of a rank that is not there, as it would read it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.stream_reader import Stream
from lightning_ft.data.workers import shield_workers, start_of_workers
from lightning_ft.elastic.engine import Engine
from lightning_ft.strategies.data_shares import DataShares
from lightning_ft.strategies.evaluation import distributed_samplers, reshard


class StreamSources:
    """The streams of a training, by rank.

    Whatever depends on the rank is made or run while this process is numbered as that rank: the loaders, if a method of
    the user's returns them, and their iteration. Samplers that Lightning made are told to deal to it.

    Args:
        engine: Numbers this process.
        own: The loaders of this rank, as Lightning prepared them.
        combine: Makes one stream of loaders.
        remake: Has the user's method return its loaders again; None if they are objects that were passed in.
        shards: Whether distributed samplers are Lightning's to make.

    """

    def __init__(
        self,
        engine: Engine,
        own: Sequence[Any],
        combine: Callable[[Sequence[Any]], Any],
        remake: Callable[[], Any] | None,
        *,
        shards: bool,
    ) -> None:
        self._engine = engine
        self._own = list(own)
        self._combine = combine
        self._remake = remake
        self._shards = shards
        shares = DataShares(engine)
        self._home = self._numbered = shares.own, shares.count
        self._has_other_numbers = False

    def find(self, rank: int, num_ranks: int) -> Stream:
        """Return the stream of ``rank`` of ``num_ranks``."""
        if self._numbered != (rank, num_ranks):
            self._numbered, self._has_other_numbers = (rank, num_ranks), True
        loaders = self._own
        if self._has_other_numbers:
            if self._numbered != self._home:
                loaders = self._loaders_of(rank, num_ranks)
            for loader in loaders:
                self._number(loader, rank, num_ranks)
        return Stream(
            self._combine(loaders),
            partial(self._engine.numbered_as, rank, num_ranks),
            _StreamMemory(self._engine, rank),
        )

    def _loaders_of(self, rank: int, num_ranks: int) -> list[Any]:
        """The same objects, where only a sampler makes the difference."""
        if self._remake is None:
            return self._own
        with self._engine.numbered_as(rank, num_ranks):
            loaders = self._remake()
        remade = loaders.flattened if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders).flattened
        return [mine if self._is_sharded(mine) else other for mine, other in zip(self._own, remade, strict=True)]

    def _is_sharded(self, loader: Any) -> bool:
        return self._shards and bool(distributed_samplers(loader))

    def _number(self, loader: Any, rank: int, num_ranks: int) -> None:
        kept = getattr(loader, "_iterator", None)
        if kept is not None:  # workers that persist have the number with which they began
            loader._iterator = None
            end_workers(kept)
        start = start_of_workers(loader)
        if isinstance(start, partial) and start.func is pl_worker_init_function:
            loader.worker_init_fn = None
        _auto_add_worker_init_fn(loader, rank)
        shield_workers(loader)
        for sampler in distributed_samplers(loader):
            reshard(sampler, rank, num_ranks)


class _StreamMemory:
    """What the supervisor keeps for whoever reads a stream next, within one Trainer call.

    Args:
        engine: Of the job.
        rank: Whose stream it is.

    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank

    def keep(self, value: bytes) -> None:
        """Keep ``value`` in place of the one before."""
        self._engine.record(self._key, value)

    def recall(self) -> bytes | None:
        """Return what was kept last."""
        return self._engine.recorded(self._key)

    @property
    def _key(self) -> str:
        return f"stream/{self._engine.call}/{self._rank}"
