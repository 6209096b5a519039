"""The ranks of any strategy by the lasting names of their places, for what callbacks tell each other."""

import threading
from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_ft.errors import ExcludedError

_PATIENCE = 120.0


def slot_of(trainer: Trainer) -> int:
    """Return this rank's slot: its place, whatever its rank is now; where no rank can leave, its rank."""
    strategy: Any = trainer.strategy
    engine = getattr(strategy, "engine", None)
    return trainer.global_rank if engine is None else int(engine.slot)


def shard_of(trainer: Trainer) -> int:
    """Return which shard of the state this rank holds; all that hold the same one must hold the same."""
    strategy: Any = trainer.strategy
    engine = getattr(strategy, "engine", None)
    return 0 if engine is None else int(engine.replica.shard)


def replica_of(trainer: Trainer) -> int:
    """Return which copy of the state this rank holds, or has a share in; all that share one have the same."""
    strategy: Any = trainer.strategy
    engine = getattr(strategy, "engine", None)
    return trainer.global_rank if engine is None else min(engine.replica.slots)


def is_elastic(trainer: Trainer) -> bool:
    """Return whether ranks may leave and join."""
    return hasattr(trainer.strategy, "gather_objects")


def exclude(trainer: Trainer, slots: Collection[int], reason: str) -> None:
    """Collective. Have ``slots`` removed, which are not to be trusted; does not return in those.

    Raises:
        ExcludedError: In one of them, if nobody removes it.

    """
    live = gather_by_slot(trainer, None)  # who leaves at once might take along what the others have yet to hear of it
    if slot_of(trainer) in slots:
        strategy: Any = trainer.strategy
        strategy.exclude(live.keys() & set(slots), reason)  # by each: who loses its replica by that may not come to say it
        threading.Event().wait(_PATIENCE)
        raise ExcludedError(slot_of(trainer), reason)


def gather_by_slot(trainer: Trainer, value: Any) -> dict[int, Any]:
    """Collective. Return the values of all live ranks."""
    strategy: Any = trainer.strategy
    if is_elastic(trainer):
        return dict(strategy.gather_objects((slot_of(trainer), value)))
    if trainer.world_size == 1:
        return {0: value}
    rows: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(rows, value)
    return dict(enumerate(rows))


def send_tensor(
    trainer: Trainer, tensor: Tensor | None, sources: list[int], *, overwrite: bool, piece: int = 1 << 24
) -> bool:
    """Collective. Overwrite a tensor with that of another rank, piece by piece, so that it takes little memory.

    Args:
        trainer: Of this rank.
        tensor: This rank's; None if it has no part in it.
        sources: Slots that have it: the first one that is alive sends.
        overwrite: Whether this rank's is to be overwritten.
        piece: Numbers to send at once.

    Returns:
        Whether it was sent: False if all sources are gone, alike on all ranks.

    """
    flat = None if tensor is None else tensor.detach().contiguous().reshape(-1)
    start, end = 0, None
    while end is None or start < end:
        is_source = flat is not None and slot_of(trainer) == sources[0]
        mine = (flat.numel(), flat[start : start + piece].cpu()) if flat is not None and is_source else None
        rows = gather_by_slot(trainer, mine)
        sent = next((row for row in rows.values() if row is not None), None)
        if sent is None:
            sources = [slot for slot in sources if slot in rows]
            if not sources:
                return False
            continue
        end, received = sent
        if overwrite and flat is not None:
            flat[start : start + len(received)] = received.to(flat.device)
        start += max(1, len(received))
    if overwrite and tensor is not None and flat is not None and tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.reshape(tensor.shape))
    return True
