"""The private name of torch that dumps need, checked at import."""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

_graph_task = getattr(torch._C, "_current_graph_task_id", None)
if _graph_task is None:  # pragma: no cover
    raise ImportError(f"torch {torch.__version__} has no `_C._current_graph_task_id`, which tells a recomputation apart.")


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward pass in it computes again what activation checkpoints left out."""
    return int(_graph_task()) != -1  # type: ignore[misc]


def class_name(module: Module) -> str:
    """Return the name of a module's class as its author knows it: ``fully_shard`` makes another one of it."""
    cls = type(module)
    return (cls.__bases__[-1] if isinstance(module, FSDPModule) else cls).__name__
