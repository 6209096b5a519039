"""The default process group of an elastic job: a proxy whose members change while its identity does not.

Handles that users or libraries hold stay valid, and what they call on it becomes a numbered operation of the engine.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.elastic._torch_compat import DEFAULT_GROUP_NAME, install_default_group
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine


class _Done(dist.Work):
    """The handle of an operation that was over before it was returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class ElasticProcessGroup(dist.ProcessGroup):
    """A process group whose rank and size follow the live membership.

    Args:
        engine: Knows the membership.
        collectives: Runs the operations.

    """

    def __init__(self, engine: Engine, collectives: Collectives) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._engine = engine
        self._collectives = collectives

    def rank(self) -> int:
        return self._engine.rank

    def size(self) -> int:
        return len(self._engine.members) or self._engine.num_slots

    def getBackendName(self) -> str:
        return "gloo"

    def name(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return DEFAULT_GROUP_NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._overwrite(tensors, self._collectives.all_reduce(tensors, op))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        src = 0 if opts is None else opts.rootRank
        return self._overwrite(tensors, self._collectives.broadcast_tensors(tensors, src))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._overwrite(output, self._gather(tensor, len(output)))
        return _Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        count = output.numel() // max(tensor.numel(), 1)
        gathered = torch.stack(self._gather(tensor, count))
        return self._overwrite([output], [gathered.view(output.shape)])

    def barrier(self, opts: Any = None) -> dist.Work:
        self._collectives.barrier("torch.distributed")
        return _Done()

    def _gather(self, tensor: Tensor, expected: int) -> list[Tensor]:
        gathered = self._collectives.all_gather(tensor)
        if len(gathered) != expected:
            raise RuntimeError(
                f"`torch.distributed.all_gather` into {expected} tensors, but {len(gathered)} ranks are alive: membership"
                " changed. Use `self.all_gather`, which returns one row for every live rank."
            )
        return gathered

    @staticmethod
    def _overwrite(tensors: list[Tensor], results: list[Tensor]) -> dist.Work:
        for tensor, result in zip(tensors, results, strict=True):
            tensor.detach().copy_(result)
        return _Done()

    def _refuse(self, *args: Any, **kwargs: Any) -> dist.Work:
        raise NotImplementedError(
            "This collective is not available on the default process group of `FTStrategy`, whose members may change."
            " Available: all_reduce, broadcast, all_gather, all_gather_into_tensor, barrier and the object variants of them."
        )

    reduce = gather = scatter = reduce_scatter = send = recv = recv_anysource = _refuse
    alltoall = alltoall_base = allgather_coalesced = allreduce_coalesced = allgather_into_tensor_coalesced = _refuse
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = monitored_barrier = _refuse


class _NoStore(dist.Store):
    """Stands where ``torch.distributed.new_group`` looks for a store, and says why there is none."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "`torch.distributed.new_group` is not available under `FTStrategy`: a group of its own would break with the"
            " first rank that dies. Use the default group, whose members are the live ranks."
        )

    set = get = wait = add = check = compare_set = _refuse


_installed: ElasticProcessGroup | None = None


def install_once(engine: Engine, collectives: Collectives) -> None:
    """Make the elastic group the default one of ``torch.distributed``, and of torchmetrics, for this process."""
    global _installed
    if _installed is None:
        _installed = ElasticProcessGroup(engine, collectives)
        install_default_group(_installed, _NoStore(), engine.num_slots)
        _gather_in_one_operation(collectives, _installed)


def _gather_in_one_operation(collectives: Collectives, proxy: dist.ProcessGroup) -> None:
    """Let torchmetrics gather a state by one operation; its own way takes three, and a rank may die between them."""
    import torchmetrics.metric
    import torchmetrics.utilities.distributed as torchmetrics_distributed

    original = torchmetrics_distributed.gather_all_tensors

    def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
        if group is None or group is proxy:
            return collectives.all_gather_ragged(result)
        return original(result, group)

    for module in (torchmetrics.metric, torchmetrics_distributed):
        module.gather_all_tensors = gather_all_tensors  # type: ignore[attr-defined]
