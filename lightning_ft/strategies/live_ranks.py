"""Who the ranks of a strategy are, as long as they live, and what they say to each other."""

from collections.abc import Collection
from typing import Any

import torch
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine, SoloEngine
from lightning_ft.elastic.gathering import gather_with_gradients
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.elastic.replica import Replica
from lightning_ft.strategies.startup import StartupRecord

_REDUCE_OPS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}


class LiveRanks(ParallelStrategy):
    """A strategy whose ranks are those of an elastic engine: they change, and collectives are among the live ones."""

    is_distributed = True

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = 1
        self.engine: Engine = SoloEngine()
        self.collectives = Collectives(self.engine)
        self._startup = StartupRecord(self.engine)

    # Ranks.

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        environment = RankEnvironment.of_process()
        return self.parallel_devices[0 if environment is None else environment.slot]

    @property
    def num_processes(self) -> int:
        """Number of slots on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    @override
    def global_rank(self) -> int:
        environment = RankEnvironment.of_process()
        if isinstance(self.engine, SoloEngine):
            return 0 if environment is None or (environment.incarnation == 0 and environment.slot == 0) else 1
        return self.engine.rank

    @property
    @override
    def local_rank(self) -> int:
        return self.global_rank  # one machine; the device follows the slot, not the rank

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return len(self.engine.members) or self.num_processes

    @property
    def members(self) -> tuple[int, ...]:
        """Slots of the live ranks, by rank."""
        return self.engine.members

    @property
    def replica(self) -> Replica:
        """The ranks that hold a copy of the module together, as this rank knows them."""
        return self.engine.replica

    @property
    def replicas(self) -> tuple[int, int]:
        """How many replicas are live, and how many there are if nothing is missing."""
        replica = self.engine.replica
        return replica.count, self.engine.num_slots // replica.size

    @property
    def seconds_waited(self) -> float:
        """For how long this process communicated with other ranks, or waited for them, since it was started."""
        return self.engine.seconds_waited

    def exclude(self, slot: int | Collection[int], reason: str) -> None:
        """Remove live ranks that are not to be trusted; their slots are started again as after a death.

        Args:
            slot: The slot to remove, or several, which leave at once.
            reason: Why; for the log.

        Raises:
            ValueError: If a slot is not live.

        """
        self.engine.exclude((slot,) if isinstance(slot, int) else slot, reason)

    def set_world_ranks(self) -> None:
        """Have everything that asks for the rank see the live one."""
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # Collectives.

    @override
    def barrier(self, name: str | None = None) -> None:
        """Collective. Return once every live rank is in this barrier."""
        self.collectives.barrier(name or "strategy")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Collective. Return the object of rank ``src``; a joiner gets what was sent when the job started."""
        return self._startup.recall(obj, lambda: self.collectives.broadcast_object(obj, src))

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Collective. Reduce ``tensor`` over the live ranks; for a mean, over those that have a batch of their own."""
        if not isinstance(tensor, Tensor):
            return tensor
        if isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            result = self.collectives.mean(tensor)
            return tensor.copy_(result) if tensor.is_floating_point() else result
        op = _REDUCE_OPS[reduce_op.lower()] if isinstance(reduce_op, str) else reduce_op or ReduceOp.SUM
        return tensor.copy_(self.collectives.reduce(tensor, op))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Collective. Whether all live ranks, or any of them, say yes."""
        yes, total = self.collectives.count(bool(decision))
        return yes == total if all else yes > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Collective. Return the tensors of the live ranks, stacked by rank."""
        if sync_grads:
            return gather_with_gradients(tensor, self.collectives)
        return torch.stack(self.collectives.all_gather(tensor))
