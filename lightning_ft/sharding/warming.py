"""What FSDP2 does only once in a process, done before others wait for it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def warm_up(mesh: DeviceMesh) -> None:
    """Collective in the replica. Take a step with a module of a few parameters: the first one imports and looks up much.

    Args:
        mesh: Of the replica.

    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        module = nn.Linear(mesh.size(), mesh.size()).to(mesh.device_type)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        module(torch.ones(2, mesh.size(), device=mesh.device_type)).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
