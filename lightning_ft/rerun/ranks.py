"""What the ranks of a training agree on about a step."""

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """The ranks that run a step together."""

    @property
    def rank(self) -> int:
        """Which of them this process is."""

    def any(self, decision: bool) -> bool:
        """Collective. Whether any of them says yes."""

    def gather(self, value: Any) -> list[Any]:
        """Collective. Return the values of all of them, by rank; plain data."""


class DefaultRanks:
    """Those of the default process group of torch.distributed, or this process alone if there is none."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._are_several else 0

    @property
    def _are_several(self) -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def any(self, decision: bool) -> bool:
        if not self._are_several:
            return decision
        on_cuda = dist.get_backend() == "nccl"
        flag = torch.tensor([float(decision)], device=torch.cuda.current_device() if on_cuda else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, value: Any) -> list[Any]:
        if not self._are_several:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
