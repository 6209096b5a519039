"""The private name of torch that dumps need, checked at import."""

import torch

_graph_task = getattr(torch._C, "_current_graph_task_id", None)
if _graph_task is None:  # pragma: no cover
    raise ImportError(f"torch {torch.__version__} has no `_C._current_graph_task_id`, which tells a recomputation apart.")


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward pass in it computes again what activation checkpoints left out."""
    return int(_graph_task()) != -1  # type: ignore[misc]
