"""Every private name of torch that the elastic engine uses, checked when it is imported.

A torch release that renames one of them fails here, with its name, and not in the middle of a recovery.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional

__all__ = [
    "GLOO_NAMES",
    "SHARD_GROUP_NAME",
    "create_gloo_group",
    "install_default_group",
    "install_shard_group",
    "number_shard_group",
    "self_test",
    "uninstall_default_group",
]

_REQUIRED: tuple[tuple[Any, str], ...] = (
    (c10d, "_world"),
    (c10d, "_update_default_pg"),
    (c10d._World, "pg_map"),
    (c10d._World, "pg_names"),
    (c10d._World, "pg_group_ranks"),
    (c10d._World, "pg_backend_config"),
    (torch._C._distributed_c10d, "_register_process_group"),
    (torch._C._distributed_c10d, "ProcessGroup"),
    (functional, "_AllGather"),
)
_missing = [f"{owner.__name__}.{name}" for owner, name in _REQUIRED if not hasattr(owner, name)]
if dist.is_gloo_available():
    from torch.distributed import ProcessGroupGloo

    _missing += [f"ProcessGroupGloo.{n}" for n in ("_Options", "create_device") if not hasattr(ProcessGroupGloo, n)]
if _missing:
    raise ImportError(
        f"lightning_ft does not know torch {torch.__version__}: {', '.join(_missing)} is missing."
        " Install a torch release within the range that lightning_ft's package metadata states."
    )

DEFAULT_GROUP_NAME = "lightning_ft"
SHARD_GROUP_NAME = "lightning_ft_shard"
GLOO_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
}
"""What gloo calls the collectives to which torch has given new names."""


def create_gloo_group(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> ProcessGroup:
    """Connect ``size`` ranks over gloo; all sockets of the group have ``address`` at one end.

    Args:
        store: Where the ranks find each other; a fresh prefix for every group.
        rank: Position of this process.
        size: Number of processes.
        address: IP address that this process listens on.
        timeout: Bound of the set-up and of every operation.

    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 2
    # By its type no ProcessGroup, but it has all of one's collectives, and nothing here asks for more.
    return ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]


def install_default_group(group: ProcessGroup, store: Store, num_slots: int) -> None:
    """Make ``group`` the one that ``torch.distributed`` uses when none is named."""
    if c10d._world.default_pg is not None:
        raise RuntimeError(
            "A default process group exists already. `FTStrategy` makes its own: remove the call of"
            " `torch.distributed.init_process_group` before `Trainer.fit`."
        )
    c10d._world.pg_map[group] = ("gloo", store)
    c10d._world.pg_names[group] = DEFAULT_GROUP_NAME  # type: ignore[assignment]
    # One entry for every rank there can ever be: the live ones are a prefix of these.
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(num_slots)}
    c10d._world.pg_backend_config[group] = "cpu:gloo"
    c10d._update_default_pg(group)


def install_shard_group(group: ProcessGroup) -> None:
    """Let ``torch.distributed`` find ``group`` by its name and as the group of a device mesh."""
    c10d._world.pg_map[group] = ("gloo", None)  # type: ignore[assignment]  # no store: it would break with the first death
    c10d._world.pg_names[group] = group.group_name
    c10d._world.pg_backend_config[group] = "cpu:gloo"
    torch._C._distributed_c10d._register_process_group(group.group_name, group)


def number_shard_group(group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Say which global ranks the shards of ``group`` are, in their order; they change whenever a rank is gone."""
    c10d._world.pg_group_ranks[group] = {rank: shard for shard, rank in enumerate(ranks)}


def uninstall_default_group(group: ProcessGroup) -> None:
    """Undo :func:`install_default_group`; may be called twice."""
    if c10d._world.default_pg is group:
        c10d._update_default_pg(None)
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"):
        getattr(c10d._world, table).pop(group, None)


def self_test(make_group: Callable[[], ProcessGroup]) -> None:
    """Check on this torch that a proxy can be the default group and that gloo binds to the address it is given.

    Args:
        make_group: Returns the proxy to install.

    Raises:
        RuntimeError: Naming what does not work.

    """
    store = dist.HashStore()
    gloo = create_gloo_group(PrefixStore("self_test", store), 0, 1, "127.77.255.1", timedelta(seconds=10))
    gloo.allreduce([torch.ones(1)]).wait()
    with socket.create_server(("127.77.255.1", 0)):
        pass  # the whole 127/8 block is local: one address a generation tells their sockets apart
    proxy = make_group()
    install_default_group(proxy, store, num_slots=1)
    try:
        if dist.get_world_size() != 1 or dist.get_rank() != 0:
            raise RuntimeError(f"torch {torch.__version__}: the default process group does not answer for the proxy.")
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    finally:
        uninstall_default_group(proxy)
    if dist.is_initialized():
        raise RuntimeError(f"torch {torch.__version__}: the default process group can't be taken back.")
