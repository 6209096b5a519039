"""What FSDP2 does only once in a process, done before others wait for it."""

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard

from lightning_ft.sharding.mesh import shard_mesh


def warm_up(group: ProcessGroup, device_type: str) -> None:
    """Collective in the replica. Take a step with a module of a few parameters: the first one imports and looks up much.

    Args:
        group: Of the replica.
        device_type: Of the parameters.

    """
    mesh = shard_mesh(group, device_type)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        module = nn.Linear(mesh.size(), mesh.size()).to(mesh.device_type)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        module(torch.ones(2, mesh.size(), device=mesh.device_type)).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
