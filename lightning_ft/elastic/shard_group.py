"""The process group of a replica: one object for the life of the process, whatever ranks the replica consists of.

What FSDP2 and DTensor keep of a group, a handle or its name, stays valid when the replica is made anew. Unlike those of the
default group, its collectives are not tried again: when a rank of the replica is gone they raise
:class:`~lightning_ft.elastic.replica.ReplicaLost`, since what came before them is lost with that rank, too.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ft.elastic._torch_compat import GLOO_NAMES, SHARD_GROUP_NAME
from lightning_ft.elastic.groups import Group, Work
from lightning_ft.elastic.replica import Replica


class ShardGroup(dist.ProcessGroup):
    """A process group whose ranks are the shards of this replica.

    Args:
        replica: The replica, or one like that which this process is to be part of.
        fail: Called when a rank of the replica is gone; raises, or does not return.
        name: By which torch finds it.

    """

    def __init__(self, replica: Replica, fail: Callable[[], NoReturn], name: str = SHARD_GROUP_NAME) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._fail = fail
        self._name = name
        self.replica = replica
        """The replica, whose ranks collectives reach once they are connected."""
        self._inner: Group | None = None
        self._is_lost = False

    def connect(self, group: Group | None) -> None:
        """Let collectives go through ``group`` from now on; one rank needs none."""
        self._inner, self._is_lost = group, False

    def lose(self) -> Group | None:
        """Let all collectives raise from now on; return what they went through."""
        inner, self._inner = self._inner, None
        self._is_lost = self._is_lost or inner is not None
        return inner

    @property
    def is_connected(self) -> bool:
        """Whether collectives reach the other ranks of the replica."""
        return self._inner is not None

    def rank(self) -> int:
        return self.replica.shard

    def size(self) -> int:
        return self.replica.size

    getRank, getSize = rank, size  # what torch's C++ calls

    def getBackendName(self) -> str:
        return "gloo"

    def name(self) -> str:
        return "gloo"

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._start("allreduce", (tensors, opts), tensors, lambda: self._reduce_alike(tensors, opts.reduceOp))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        works = [self.allreduce([tensor], _reducing(opts)) for tensor in tensors]
        return _AllOf(works, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return self._start("reduce", (tensors, opts), tensors, lambda: self._reduce_alike(tensors, opts.reduceOp))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._start("broadcast", (tensors, opts or dist.BroadcastOptions()), tensors, _nothing)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def alike() -> None:
            for output in outputs[0]:
                output.detach().copy_(inputs[0])

        return self._start("allgather", (outputs, inputs, c10d.AllgatherOptions()), outputs, alike)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        rows = zip(zip(*outputs, strict=True), inputs, strict=True)
        return _AllOf([self.allgather([list(row)], [tensor]) for row, tensor in rows], outputs)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def alike() -> None:
            for output in outputs[0] if outputs else ():
                output.detach().copy_(inputs[0])

        return self._start("gather", (outputs, inputs, opts or dist.GatherOptions()), outputs, alike)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        def alike() -> None:
            outputs[0].detach().copy_(inputs[0][self.rank()]) if inputs else outputs[0].detach().zero_()

        return self._start("scatter", (outputs, inputs, opts or dist.ScatterOptions()), outputs, alike)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        def alike() -> None:
            if tensor.numel():
                output.detach().view(self.size(), -1).copy_(tensor.reshape(1, -1).expand(self.size(), -1))

        return self._start("all_gather_single", (output, tensor, c10d.AllgatherOptions()), output, alike)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # what older versions of torch call

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _AllOf([self.all_gather_single(output, tensor) for output, tensor in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        # By an exchange of rows: gloo's own reduces them all to all ranks, and its wait heeds no timeout.
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        fold = next((fold for known, fold in _FOLDS if op == known), None)  # as keys, the two kinds of `op` differ
        if fold is None:
            raise NotImplementedError(f"`reduce_scatter` with {op} is not available in the group of a replica.")
        rows = output.new_empty(self.size(), *output.shape)

        def alike() -> None:
            rows.copy_(tensor.reshape(rows.shape)[self.rank()].expand(rows.shape))

        work = self._start(
            "all_to_all_single", (rows.view(-1), tensor.reshape(-1), [], [], c10d.AllToAllOptions()), rows, alike
        )
        return _Folded(work, output, rows, fold)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, torch.stack(rows), opts) for output, rows in pairs]
        return _AllOf(works, outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _AllOf([self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        arguments = (output, tensor, output_splits, input_splits, opts or c10d.AllToAllOptions())
        return self._start("all_to_all_single", arguments, output, lambda: output.detach().zero_())

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        sizes = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        received = outputs[0].new_empty(sum(sizes[0]))
        sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
        self.all_to_all_single(received, sent, *sizes).wait()
        for output, row in zip(outputs, received.split(sizes[0]), strict=True):
            output.detach().copy_(row.view(output.shape))
        return _AllOf([], outputs)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("`send` and `recv` are not available in the group of a replica. Use a collective.")

    send = recv = recv_anysource = _refuse

    def _start(self, name: str, arguments: tuple[Any, ...], outputs: Any, alike: Callable[[], Any]) -> dist.Work:
        """Start a collective; by itself, this rank does as if all others were like it."""
        if self._is_lost:
            self._fail()
        if self._inner is None:
            alike()
            return _AllOf([], outputs)
        try:
            work = self._inner.start(GLOO_NAMES.get(name, name), *arguments)
        except RuntimeError:
            self._fail()
        return _ReplicaWork(work, outputs, self._fail)

    def _reduce_alike(self, tensors: list[Tensor], op: Any) -> None:
        for tensor in tensors if op == ReduceOp.SUM else ():
            tensor.detach().mul_(self.size())


_FOLDS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (ReduceOp.SUM, lambda rows: rows.sum(0)),
    (ReduceOp.AVG, lambda rows: rows.sum(0).div_(len(rows))),
    (ReduceOp.MAX, lambda rows: rows.amax(0)),
    (ReduceOp.MIN, lambda rows: rows.amin(0)),
)


def _nothing() -> None:
    pass


def _reducing(opts: Any) -> Any:
    options = dist.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options


class _ReplicaWork(dist.Work):
    def __init__(self, work: Work, outputs: Any, fail: Callable[[], NoReturn]) -> None:
        super().__init__()
        self._fail = fail
        self._work = work
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._work.wait()
        except RuntimeError:
            self._fail()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> Any:
        return self._outputs


class _Folded(dist.Work):
    """Ends in ``output`` being what ``rows`` add up to."""

    def __init__(self, work: dist.Work, output: Tensor, rows: Tensor, fold: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._work = work
        self._output = output
        self._rows = rows
        self._fold = fold

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._output.detach().copy_(self._fold(self._rows))
        return True

    def is_completed(self) -> bool:
        return False  # not before somebody waited for it

    def result(self) -> Any:
        return self._output


class _AllOf(dist.Work):
    def __init__(self, works: list[dist.Work], outputs: Any) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future
