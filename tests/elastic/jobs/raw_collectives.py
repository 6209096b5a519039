"""Every collective of ``torch.distributed`` that training code may call, as JSON; as a script over gloo itself."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor


def call_all(rank: int, size: int) -> dict[str, Any]:
    def mine(*shape: int) -> Tensor:
        return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) * (rank + 1)

    def empty(count: int, *shape: int) -> list[Tensor]:
        return [torch.full(shape, -1.0) for _ in range(count)]

    results: dict[str, Any] = {"backend": dist.get_backend(), "size": dist.get_world_size()}
    summed, largest, (one, other) = mine(2, 3).T, mine(4), (mine(2), mine(3))
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).wait()
    dist.all_reduce_coalesced([one, other])
    results["all_reduce"] = [summed, largest, one, other]
    reduced = mine(2)
    dist.reduce(reduced, dst=1)
    results["reduce"] = reduced if rank == 1 else None
    sent = mine(3)
    dist.broadcast(sent, src=2)
    results["broadcast"] = sent
    gathered, flat, at_one = empty(size, 2), torch.empty(2 * size), empty(size if rank == 1 else 0, 2)
    dist.all_gather(gathered, mine(2))
    dist.all_gather_into_tensor(flat, mine(2))
    dist.gather(mine(2), at_one or None, dst=1)
    results["gather"] = [gathered, flat, at_one]
    scattered, rows, (reduced, single) = torch.empty(2), list(mine(size, 2)), empty(2, 2)
    dist.scatter(scattered, rows if rank == 1 else None, src=1)
    dist.reduce_scatter(reduced, rows)
    dist.reduce_scatter_tensor(single, mine(2 * size))
    results["scatter"] = [scattered, reduced, single]
    swapped, received, ragged = empty(size, 2), torch.empty(size), torch.empty((rank + 1) * size)
    dist.all_to_all(swapped, rows)
    dist.all_to_all_single(received, mine(size))
    ones = list(range(1, size + 1))
    dist.all_to_all_single(ragged, mine(sum(ones)), [rank + 1] * size, ones)
    results["all_to_all"] = [swapped, received, ragged]
    objects, at_zero, from_one, picked = [None] * size, [None] * size, [rank, "x" * rank], [None]
    dist.all_gather_object(objects, {"rank": rank, "text": "y" * rank})
    dist.gather_object(rank, at_zero if rank == 0 else None, dst=0)
    dist.broadcast_object_list(from_one, src=1)
    dist.scatter_object_list(picked, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    results["objects"] = [objects, at_zero, from_one, picked]
    dist.barrier()
    dist.monitored_barrier()
    everybody = dist.new_group()
    dist.all_reduce(same := mine(2), group=everybody)
    results["group"] = [same, dist.get_rank(everybody), dist.get_world_size(everybody)]
    leaf = mine(2).requires_grad_()
    (torch.stack(dist_nn.all_gather(leaf)).prod() + dist_nn.all_reduce(leaf).square().sum()).backward()
    results["gradient"] = leaf.grad
    return as_json(results)


def as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


if __name__ == "__main__":
    dist.init_process_group("gloo")
    result = call_all(dist.get_rank(), dist.get_world_size())
    Path(f"result_{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
