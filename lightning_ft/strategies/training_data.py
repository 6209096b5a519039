"""Chooses the loader that a rank trains from, and tells it what all ranks must see alike."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.streams import StreamLoader
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.strategies.startup import StartupRecord

TrainLoader = ElasticLoader | StreamLoader


class TrainingData:
    """Makes the training loader of one rank.

    Args:
        trainer: The trainer.
        engine: Knows the membership.
        startup: Answers joiners with what the ranks agreed on at the start.
        broadcast: Sends an object from rank 0 to all, or to a joiner that of the start.

    """

    def __init__(self, trainer: Trainer, engine: Engine, startup: StartupRecord, broadcast: Callable[[Any], Any]) -> None:
        self._trainer = trainer
        self._engine = engine
        self._startup = startup
        self._broadcast = broadcast
        self.pause_agreed = False
        """Whether the ranks learned, when they told each other what batches they have, that somebody waits to join."""

    def make_loader(self, dataloader: Any) -> TrainLoader:
        """Collective. Return what this rank iterates in place of ``dataloader``."""
        slot = self._engine.slot
        limit = 1.0 if self._trainer.limit_train_batches is None else self._trainer.limit_train_batches
        if _has_shared_order(dataloader):
            loader = ElasticLoader(
                dataloader, slot, self._engine.num_slots, self._current_epoch, agree=self._agree_on_order, limit=limit
            )
            _auto_add_worker_init_fn(loader, slot)
            return loader
        _auto_add_worker_init_fn(dataloader, slot)
        return StreamLoader(
            dataloader,
            slot,
            self._engine.num_slots,
            self._current_epoch,
            exchange=self._exchange_offers,
            lengths=self._agree_on_lengths(sized_len(dataloader)),
            limit=limit,
            in_stream=self._engine.numbered_by_slot,
        )

    def _current_epoch(self) -> int:
        return self._trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined,no-any-return]

    def _agree_on_order(self, draw: Callable[[], Tensor]) -> Tensor:
        mine = draw() if self._engine.alone or self._engine.rank == 0 else None
        order: Tensor = self._broadcast(mine)
        return order

    def _agree_on_lengths(self, mine: int | None) -> list[int] | None:
        """Collective. Return the length of every slot's stream, or None if any has none."""
        packed = str(-1 if mine is None else mine).encode()
        lengths: dict[int, bytes] = self._startup.recall({}, lambda: self._exchange("length of a stream", packed)[0])
        known = [int(lengths.get(slot, packed)) for slot in range(self._engine.num_slots)]
        return None if min(known) < 0 else known

    def _exchange_offers(self, mine: bytes) -> dict[int, bytes]:
        rows, hold = self._exchange("next batch", bytes([self._engine.join_wanted]) + mine)
        self.pause_agreed = hold or any(row[0] for row in rows.values())
        return {slot: row[1:] for slot, row in rows.items()}

    def _exchange(self, label: str, mine: bytes) -> tuple[dict[int, bytes], bool]:
        """Collective. Return what each live slot says, and whether too few of them are left to go on."""

        def body(exchange: Exchange) -> tuple[dict[int, bytes], bool]:
            slots = [self._engine.slot] if exchange.group is None else self._engine.members
            return dict(zip(slots, exchange.inline, strict=True)), self._engine.hold

        return self._engine.run(label, body, inline=mine)


def _has_shared_order(dataloader: object) -> bool:
    """Whether all ranks know which samples there are: then any rank can train any of them."""
    return (
        isinstance(dataloader, DataLoader)
        and not isinstance(dataloader.dataset, IterableDataset)
        and isinstance(dataloader.sampler, DistributedSampler)
    )
