"""Training state that moves to another number of ranks, in place.

Parameter objects stay the same, and with them what refers to them: optimizers, hooks, averaged copies, the user's own
lists. Gradients are dropped.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_ft.sharding._fsdp_compat import abandon_pass, missing_names, move_units
from lightning_ft.sharding.shard_tree import put_together

log = logging.getLogger(__name__)


def reshard(
    module: nn.Module, optimizers: Sequence[Optimizer], mesh: DeviceMesh, states: Sequence[Any], *, base: int = 0
) -> None:
    """Move a sharded module and its optimizers to ``mesh``, with the state that other ranks collected.

    Args:
        module: A module that ``fully_shard`` was applied to, and may be in the middle of a pass that failed.
        optimizers: Its optimizers.
        mesh: One dimension; its size may differ from that of the mesh so far.
        states: What ``take_apart(collect(module, optimizers))`` returned on each of the ranks that held the state, by
            their rank.
        base: Whose values this rank takes where nothing is sharded.

    """
    move(module, optimizers, mesh)
    restore(module, optimizers, put_together(states, base, mesh))


def move(module: nn.Module, optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """Give a module shards on another mesh, content undefined; optimizers forget what they know of its parameters.

    Raises:
        RuntimeError: If this torch is not known well enough for that.

    """
    if missing := missing_names():
        raise RuntimeError(f"torch {torch.__version__} can't move shards in place: {', '.join(missing)} is missing.")
    abandon_pass(module)
    for optimizer in optimizers:
        optimizer.state.clear()
    move_units(module, mesh)


def collect(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state of a sharded module and its optimizers: no copies, and sharded tensors as they are."""
    state_dict = module.state_dict()
    return {
        "module": dict(state_dict),
        "buffers": {name: buffer for name, buffer in module.named_buffers() if name not in state_dict},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }


@torch.no_grad()
def restore(module: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]) -> None:
    """Load what :func:`collect` returned, with its sharded tensors on the module's own mesh."""
    module.load_state_dict(state["module"])
    buffers = dict(module.named_buffers())
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)
    for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(own)
