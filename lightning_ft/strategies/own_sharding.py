"""Modules that shard themselves in ``configure_model``: FSDP2 over the ranks of a replica is taken over, nothing else is."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_ft.sharding._fsdp_compat import managed_parameters
from lightning_ft.sharding.mesh import DIMENSION

_EXPECTED = f'Expected `fully_shard(part, mesh=self.device_mesh["{DIMENSION}"])`, or no sharding at all'


@contextmanager
def explaining_dimensions(call: str) -> Iterator[None]:
    """While a module shards itself: say what is wrong if it asks for ranks that work on one batch together.

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
            f'`{call}`: `configure_model` asks `self.device_mesh` for another dimension than "{DIMENSION}", the only one:'
            f" each rank of a replica has a batch of its own, which tensor parallel layers can't have. {_EXPECTED}; or, for"
            " tensor parallelism, Lightning's `ModelParallelStrategy`, which does not outlive a rank."
        ) from error


def check_own_shards(module: Module, mesh: DeviceMesh | None, call: str) -> None:
    """Refuse a module that sharded itself otherwise than by FSDP2 over ``mesh``: it would compute something else.

    Args:
        module: The module.
        mesh: Of the replica; None if each rank holds the whole module.
        call: Of the strategy, as the user wrote it.

    Raises:
        MisconfigurationException: Naming the parameters.

    """
    ours = {id(parameter) for parameter in managed_parameters(module) if mesh is not None and _is_over(parameter, mesh)}
    sharded = [(name, parameter) for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    names = [name for name, parameter in sharded if id(parameter) not in ours]
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


def _is_over(parameter: object, mesh: DeviceMesh) -> bool:
    own = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return own is not None and own.ndim == 1 and own.get_group().group_name == mesh.get_group().group_name
