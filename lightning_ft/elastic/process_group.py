"""The default process group of an elastic job: a proxy whose members change while its identity does not.

Handles that users or libraries hold stay valid, and each collective that they call on it is one numbered operation of the
engine. Ranks that die in it are left out: a gather yields what the live ranks gave, by rank, and then zeros; all-to-all
yields zeros in their place.
"""

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.elastic import object_collectives
from lightning_ft.elastic._torch_compat import DEFAULT_GROUP_NAME, install_default_group
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.rows import RowCollectives

log = logging.getLogger(__name__)


class _Done(dist.Work):
    """The handle of an operation that was over before it was returned."""

    def __init__(self, outputs: Any = None) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


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
        self._rows = RowCollectives(engine)

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

    # One result for all.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return _overwrite(tensors, self._collectives.all_reduce(tensors, op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        before = self.rank()
        results = self._collectives.all_reduce(tensors, opts.reduceOp, label=f"reduce to {opts.rootRank}")
        if opts.rootRank in (before, self.rank()):  # who was the root, or took its place
            _overwrite(tensors, results)
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        src = 0 if opts is None else opts.rootRank
        return _overwrite(tensors, self._collectives.broadcast_tensors(tensors, src))

    def barrier(self, opts: Any = None) -> dist.Work:
        self._collectives.barrier("torch.distributed")
        return _Done()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._collectives.barrier("monitored")

    # One row from every rank.

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._fill(output, self._collectives.all_gather(tensor), "all_gather")
        return _Done(outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allgather(outputs, inputs)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        gathered = self._collectives.all_gather(inputs[0])
        if outputs:
            self._fill(outputs[0], gathered, "gather")
        return _Done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        rows = list(output.view(-1, *tensor.shape)) if tensor.numel() else []
        self._fill(rows, self._collectives.all_gather(tensor), "all_gather_into_tensor")
        return _Done(output)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # what older versions of torch call

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    # One row for every rank.

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        src = 0 if opts is None else opts.rootRank
        return _overwrite(outputs, [self._rows.scatter(outputs[0], inputs[0] if inputs else None, src)])

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        results = [self._rows.reduce_scatter(rows, op) for rows in inputs]
        return _overwrite(outputs, results)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        rows = list(tensor.reshape(-1, *output.shape))
        return self.reduce_scatter([output], [rows], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, row in zip(outputs, self._rows.all_to_all(inputs), strict=True):
            output.detach().zero_() if row is None else output.detach().copy_(row.view(output.shape))
        return _Done(outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        size = self.size()
        self.alltoall(_split(output, output_splits, size), _split(tensor, input_splits, size))
        return _Done(output)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _fill(self, outputs: list[Tensor], rows: Sequence[Tensor], name: str) -> None:
        """Overwrite ``outputs``, those for which there is no live rank with zeros."""
        if not outputs:
            return
        if self._engine.alone:  # in a start-up of its own: as if all were like this one
            rows = [rows[0]] * len(outputs)
        if len(rows) > len(outputs):
            raise ValueError(
                f"`torch.distributed.{name}` into {len(outputs)} tensors, but {len(rows)} ranks are alive: expected one for"
                " each. Ask for `torch.distributed.get_world_size()` when you make them, since ranks come back."
            )
        for output, row in zip(outputs, rows, strict=False):
            output.detach().copy_(row.view(output.shape))
        for output in outputs[len(rows) :]:
            output.detach().zero_()
        if len(rows) < len(outputs):
            log.warning(
                "`torch.distributed.%s` into %s tensors while %s ranks are alive: the last ones are zeros.",
                *(name, len(outputs), len(rows)),
            )

    # What is no operation of all ranks.

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "`torch.distributed.send`, `recv` and their variants are not available under `FTStrategy`: an operation of two"
            " ranks can't be tried again when one of them dies. Use one in which all ranks take part, such as `all_to_all`."
        )

    send = recv = recv_anysource = _refuse


def _overwrite(tensors: list[Tensor], results: Sequence[Tensor]) -> dist.Work:
    for tensor, result in zip(tensors, results, strict=True):
        tensor.detach().copy_(result.view(tensor.shape))
    return _Done(tensors)


def _split(tensor: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    return list(tensor.split(sizes)) if sizes else list(tensor.chunk(count))


class _NoStore(dist.Store):
    """Stands where torch looks for the store of the default group, and says why there is none."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "`FTStrategy` has no store for groups of your own: one would break with the first rank that dies. Use the"
            " default group, whose members are the live ranks."
        )

    set = get = wait = add = check = compare_set = _refuse


_installed: ElasticProcessGroup | None = None


def install_once(engine: Engine, collectives: Collectives) -> None:
    """Make the elastic group the default one of ``torch.distributed``, and of torchmetrics, for this process."""
    global _installed
    if _installed is None:
        _installed = ElasticProcessGroup(engine, collectives)
        install_default_group(_installed, _NoStore(), engine.num_slots)
        object_collectives.install(engine, collectives, _installed)
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
