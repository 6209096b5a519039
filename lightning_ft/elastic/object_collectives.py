"""Functions of ``torch.distributed`` that are several collectives each, made one operation; and ``new_group``.

torch sends sizes first and objects then, and a rank may die between the two. So it may between a gather and its backward
pass, where torch sends one row for each rank that there was.
"""

import pickle
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.gathering import gather_with_gradients


def install(engine: Engine, collectives: Collectives, proxy: dist.ProcessGroup) -> None:
    """Replace the functions in ``torch.distributed``, for calls on the default group.

    Args:
        engine: Knows the membership.
        collectives: Runs the operations.
        proxy: The default group.

    """
    functions = _ObjectCollectives(engine, collectives)
    for ours in (
        functions.all_gather_object,
        functions.gather_object,
        functions.broadcast_object_list,
        functions.scatter_object_list,
    ):
        _replace(ours.__name__, partial(_on_group, proxy, ours))

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        if ranks is None or sorted(ranks) == list(range(proxy.size())):
            return proxy
        raise NotImplementedError(
            f"`torch.distributed.new_group({list(ranks)})` is not available under `FTStrategy`: a group of some ranks would"
            f" break with the first of them that dies. Expected all {proxy.size()} live ranks: that is the default group."
        )

    _replace("new_group", lambda original: wraps(original)(new_group))
    functional._AllGather = _GatherWithGradients(collectives, proxy, functional._AllGather)  # type: ignore[misc,assignment]


class _GatherWithGradients:
    """Stands for the autograd function of ``torch.distributed.nn.functional.all_gather``."""

    def __init__(self, collectives: Collectives, proxy: dist.ProcessGroup, original: Any) -> None:
        self._collectives = collectives
        self._proxy = proxy
        self._original = original

    def apply(self, group: Any, tensor: Tensor) -> Any:
        if group is not None and group is not self._proxy:
            return self._original.apply(group, tensor)
        return gather_with_gradients(tensor, self._collectives).unbind()


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    replacement = make(getattr(c10d, name))
    for module in (dist, c10d):
        setattr(module, name, replacement)


def _on_group(proxy: dist.ProcessGroup, ours: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        group = kwargs.get("group", next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
        if group is not None and group is not proxy:
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return function


class _ObjectCollectives:
    def __init__(self, engine: Engine, collectives: Collectives) -> None:
        self._engine = engine
        self._collectives = collectives

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Collective. Make ``object_list`` the objects of all live ranks, by rank."""
        gathered = self._gather(obj)
        # A rank that starts by itself knows only its own.
        object_list[:] = gathered * len(object_list) if self._engine.alone else gathered

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        """Collective. Make ``object_gather_list``, where it is given, the objects of all live ranks."""
        gathered = self._gather(obj)
        if object_gather_list is not None:
            object_gather_list[:] = gathered

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Collective. Make ``object_list`` that of rank ``src``."""
        object_list[:] = self._collectives.broadcast_object(list(object_list), _first(src, group_src))

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Collective. Put the object that rank ``src`` has for this rank into ``scatter_object_output_list``."""
        if self._engine.alone:
            return
        source = _first(src, group_src)
        mine = scatter_object_input_list if self._engine.rank == source else None
        slots, objects = self._collectives.broadcast_object((list(self._engine.members), mine), source)
        if objects is None:
            raise RuntimeError(f"`torch.distributed.scatter_object_list(src={source})`: the rank that had the objects died.")
        if len(objects) != len(slots):
            raise ValueError(
                f"`torch.distributed.scatter_object_list` of {len(objects)} objects, but {len(slots)} ranks are alive:"
                " expected one for each."
            )
        scatter_object_output_list[0] = objects[slots.index(self._engine.slot)]

    def _gather(self, obj: Any) -> list[Any]:
        packed = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        return [pickle.loads(row.numpy().tobytes()) for row in self._collectives.all_gather_ragged(packed)]


def _first(*ranks: int | None) -> int:
    return next((rank for rank in ranks if rank is not None), 0)
