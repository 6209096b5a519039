"""Gives ranks the same of what each has by itself: shards that a module's own code made, and random numbers in a row."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.elastic.replica_rows import ReplicaRows
from lightning_ft.strategies.buckets import local_part


@torch.no_grad()
def make_shards_alike(engine: Engine, tensors: Sequence[Tensor]) -> None:
    """Collective. Overwrite this rank's shards among ``tensors`` with those of the first replica."""
    shards = [local_part(tensor) for tensor in tensors if isinstance(tensor, DTensor)]

    def body(exchange: Exchange) -> list[Tensor]:
        results = [shard.clone(memory_format=torch.contiguous_format) for shard in shards]
        if exchange.replicate is not None:
            works = [exchange.replicate.broadcast([result], dist.BroadcastOptions()) for result in results]
            for work in works:
                work.wait()
        return results

    for shard, value in zip(shards, engine.run("shards", body, voted=True), strict=True):
        shard.copy_(value)


def draw_alike(rows: ReplicaRows) -> None:
    """Collective in the row. Let all go on with the random numbers of the first of those that work on one batch together.

    A process by itself, which is to join, gets the state of those that it will work with.
    """
    if not rows.row.is_connected:
        return
    states = [_collect_rng_states(include_cuda=False)]
    dist.broadcast_object_list(states, group=rows.row, group_src=0, device=torch.device("cpu"))
    _set_rng_states(states[0])
