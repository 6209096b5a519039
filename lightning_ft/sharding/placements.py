"""Where the parts of a tensor lie, as plain data that can be stored and sent."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ft.errors import UnsupportedStateError
from lightning_ft.sharding._fsdp_compat import StridedShard


def to_data(placements: Iterable[Placement]) -> list[list[Any]]:
    """Return what :func:`from_data` makes the placements of again.

    Raises:
        UnsupportedStateError: If one of them is not known.

    """
    return [_describe(placement) for placement in placements]


def from_data(described: Iterable[Sequence[Any]]) -> list[Placement]:
    """Return the placements."""
    kinds: dict[str, Any] = {"replicate": Replicate, "shard": Shard, "strided": _strided}
    return [kinds[kind](*arguments) for kind, *arguments in described]


def _describe(placement: Any) -> list[Any]:
    if isinstance(placement, Replicate):
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is StridedShard:
        return ["strided", placement.dim, placement.split_factor]
    raise UnsupportedStateError("state", f"a tensor placed as {placement}", "Shard or replicate it.")


def _strided(dim: int, split_factor: int) -> Placement:
    placement: Placement = StridedShard(dim, split_factor=split_factor)
    return placement
