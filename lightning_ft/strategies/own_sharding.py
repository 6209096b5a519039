"""Modules that shard themselves in ``configure_model``: by FSDP2 over a replica, and by tensor parallelism over its rows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module

from lightning_ft.sharding._fsdp_compat import StridedShard, managed_parameters
from lightning_ft.sharding.mesh import DIMENSION, TENSOR_DIMENSION

_EXPECTED = f'Expected `fully_shard(part, mesh=self.device_mesh["{DIMENSION}"])`, or no sharding at all'


@contextmanager
def explaining_dimensions(call: str) -> Iterator[None]:
    """While a module shards itself: say what is wrong if it asks for ranks that this replica does not have.

    Args:
        call: Of the strategy, as the user wrote it.

    Raises:
        MisconfigurationException: In the place of the mesh's own error.

    """
    try:
        yield
    except KeyError as error:
        if "mesh_dim" not in str(error):
            raise
        raise MisconfigurationException(
            f"`{call}`: `configure_model` asks `self.device_mesh` for a dimension that it does not have ({error.args[0]})."
            f' {_EXPECTED}; "{TENSOR_DIMENSION}" is there with `FTStrategy(shard_size=S, tensor_parallel_size=T)`, for T'
            " ranks of each replica of S that work on one batch together."
        ) from error


def check_own_shards(module: Module, mesh: DeviceMesh | None, call: str) -> None:
    """Refuse a module that sharded itself otherwise than by FSDP2 over ``mesh``: it would compute something else.

    Args:
        module: The module.
        mesh: Of the replica; None if each rank holds the whole module. With two dimensions, the second one is for tensor
            parallelism.
        call: Of the strategy, as the user wrote it.

    Raises:
        MisconfigurationException: Naming the parameters.

    """
    managed = {id(parameter) for parameter in managed_parameters(module)}
    sharded = [(name, parameter) for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    names = [
        name
        for name, parameter in sharded
        if mesh is None or not _is_known(parameter, mesh, managed=id(parameter) in managed)
    ]
    if not names:
        return
    advice = _EXPECTED if mesh is not None else f"{_EXPECTED}, and `FTStrategy(shard_size=...)` with the ranks of a replica"
    raise MisconfigurationException(
        f"`{call}`: `configure_model` sharded {list_names(names)} in another way than with FSDP2 over the ranks of this"
        f" replica. {advice}."
    )


def list_names(names: Iterable[str]) -> str:
    """Return the first of ``names`` for an error, and how many more there are."""
    listed = list(names)
    return ", ".join(f"`{name}`" for name in listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _is_known(parameter: DTensor, mesh: DeviceMesh, *, managed: bool) -> bool:
    """Whether a parameter is as FSDP2 leaves it over the ranks of the replica, or as tensor parallelism does before that."""
    own, known = ([group.group_name for group in each.get_all_groups()] for each in (parameter.device_mesh, mesh))
    if not managed:
        return own == known[1:]
    return own in (known, known[:1]) and type(parameter.placements[0]) in (Shard, StridedShard)
