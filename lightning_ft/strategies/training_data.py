"""Chooses the loader that a rank trains from, and tells it what all ranks must see alike."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.streams import StreamLoader
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.strategies.data_shares import DataShares
from lightning_ft.strategies.evaluation import distributed_samplers, reshard
from lightning_ft.strategies.joint_loaders import JointLoaders
from lightning_ft.strategies.startup import StartupRecord
from lightning_ft.strategies.stream_sources import StreamSources

TrainLoader = ElasticLoader | StreamLoader


class TrainingData:
    """Makes the training loader of one rank.

    Args:
        trainer: The trainer.
        engine: Knows the membership.
        startup: Answers joiners with what the ranks agreed on at the start.
        broadcast: Sends an object from rank 0 to all, or to a joiner that of the start.
        constant_batch: Whether each step has as many batches as if all ranks were live.
        takes_over: Whether the streams of ranks that are away are read by others.

    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        startup: StartupRecord,
        broadcast: Callable[[Any], Any],
        *,
        constant_batch: bool = False,
        takes_over: bool = False,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._startup = startup
        self._broadcast = broadcast
        self._constant_batch = constant_batch
        self._takes_over = takes_over
        self._remake: Callable[[], Any] | None = None
        self._shares = DataShares(engine)
        self._joint: JointLoaders | None = None
        self.pause_agreed = False
        """Whether the ranks learned, when they told each other what batches they have, that somebody waits to join."""

    def watch_source(self) -> None:
        """Note what the user's code returns as training data, before Lightning takes it apart."""
        source = self._trainer.fit_loop._data_source
        request = type(source).dataloader.__get__(source)
        self._remake = request if source.is_module() else None

        def request_combined() -> CombinedLoader:
            # What depends on the rank must be the same in its next incarnation.
            with self._engine.numbered_as(self._shares.own, self._shares.count):
                loaders = request()
            combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
            self._joint = JointLoaders(combined) if len(combined.flattened) > 1 else None
            return combined

        source.dataloader = request_combined  # type: ignore[method-assign]

    def deals_out(self, dataloader: Any) -> bool:
        """Whether the batches of ``dataloader`` are dealt to the ranks, and are no stream of each."""
        return self._joint is None and _has_shared_order(dataloader)

    def make_loader(self, dataloader: Any) -> tuple[Any, TrainLoader | None]:
        """Collective. Return what Lightning iterates in place of ``dataloader``, and what this rank trains from.

        The latter is None while further loaders are to come.
        """
        if self.deals_out(dataloader):
            elastic = self._make_elastic(dataloader)
            return elastic, elastic
        self._pin_to_slot(dataloader)
        if self._joint is None:
            stream = self._make_stream([dataloader], lambda loaders: loaders[0])
            return stream, stream
        part = self._joint.add(dataloader)
        if self._joint.is_complete:
            self._joint.stream = self._make_stream(self._joint.sources, self._joint.batches)
        return part, self._joint.stream

    def _make_elastic(self, dataloader: Any) -> ElasticLoader:
        slot, num_slots = self._shares.own, self._shares.count
        loader = ElasticLoader(
            dataloader,
            slot,
            num_slots,
            self._current_epoch,
            agree=self._agree_on_order,
            limit=self._limit,
            whole_rows=self._constant_batch,
        )
        _auto_add_worker_init_fn(loader, slot)
        return loader

    def _make_stream(self, loaders: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> StreamLoader:
        shards = self._trainer._accelerator_connector.use_distributed_sampler
        source = combine(loaders)
        return StreamLoader(
            source,
            self._shares.own,
            self._shares.count,
            self._current_epoch,
            exchange=self._exchange_offers,
            borrow=self._borrow,
            find=StreamSources(self._engine, loaders, combine, self._remake, shards=shards).find,
            lengths=self._agree_on_lengths(sized_len(source)),
            limit=self._limit,
            takes_over=self._takes_over,
        )

    def _pin_to_slot(self, dataloader: Any) -> None:
        """Seed the workers by the slot, and have a sampler that Lightning made deal to slots: a rank may change."""
        _auto_add_worker_init_fn(dataloader, self._shares.own)
        if self._trainer._accelerator_connector.use_distributed_sampler:
            for sampler in distributed_samplers(dataloader):
                reshard(sampler, self._shares.own, self._shares.count)

    @property
    def _limit(self) -> int | float:
        limit = self._trainer.limit_train_batches
        return 1.0 if limit is None else limit

    def _current_epoch(self) -> int:
        return self._trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined,no-any-return]

    def _agree_on_order(self, draw: Callable[[], Tensor]) -> Tensor:
        mine = draw()  # on every rank, as under ``ddp``: it moves their random numbers on alike
        order: Tensor = self._broadcast(mine)
        return order

    def _agree_on_lengths(self, mine: int | None) -> list[int] | None:
        """Collective. Return the length of every slot's stream, or None if any has none."""
        packed = str(-1 if mine is None else mine).encode()
        lengths: dict[int, bytes] = self._startup.recall({}, lambda: self._exchange("length of a stream", packed)[0])
        known = [int(lengths.get(share, packed)) for share in range(self._shares.count)]
        return None if min(known) < 0 else known

    def _exchange_offers(self, mine: bytes) -> dict[int, bytes]:
        rows, hold = self._exchange("next batch", bytes([self._engine.join_wanted]) + mine)
        self.pause_agreed = hold or any(row[0] for row in rows.values())
        return {slot: row[1:] for slot, row in rows.items()}

    def _borrow(self, batch: Any, lender: int) -> Any:
        """Collective. Return the batch of slot ``lender``, pickled as torch's object collectives are; None if it died."""
        packed = pickle.dumps(batch) if lender == self._shares.own else b""

        def body(exchange: Exchange) -> bytes:
            sizes = [int.from_bytes(row, "big") for row in exchange.inline]
            source = next((rank for rank, size in enumerate(sizes) if size), None)
            if source is None or exchange.group is None:
                return packed
            buffer = torch.frombuffer(bytearray(packed or sizes[source]), dtype=torch.uint8)
            exchange.broadcast(buffer, source)
            return buffer.numpy().tobytes()

        received = self._engine.run("lend a batch", body, inline=len(packed).to_bytes(8, "big"))
        return pickle.loads(received) if received else None

    def _exchange(self, label: str, mine: bytes) -> tuple[dict[int, bytes], bool]:
        """Collective. Return what each live slot says, by its share, and whether too few of them are left to go on."""

        def body(exchange: Exchange) -> tuple[dict[int, bytes], bool]:
            slots = [self._engine.slot] if exchange.group is None else self._engine.members
            rows = zip(slots, exchange.inline, strict=True)
            return {share: row for slot, row in rows for share in self._shares.of([slot])}, self._engine.hold

        return self._engine.run(label, body, inline=mine)


def _has_shared_order(dataloader: object) -> bool:
    """Whether all ranks know which samples there are: then any rank can train any of them."""
    return (
        isinstance(dataloader, DataLoader)
        and not isinstance(dataloader.dataset, IterableDataset)
        and bool(distributed_samplers(dataloader))
    )
