"""Which Trainers the strategy can work for."""

from lightning.fabric.plugins.environments import ClusterEnvironment, KubeflowEnvironment, XLAEnvironment
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, Precision, XLAPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft.elastic.options import Policy

_OTHERS_PROCESSES = (KubeflowEnvironment, XLAEnvironment)
_OTHERS_PRECISIONS = (DeepSpeedPrecision, FSDPPrecision, XLAPrecision)


def check_combination(
    policy: Policy,
    *,
    num_nodes: int,
    num_devices: int,
    environment: ClusterEnvironment | None,
    precision: Precision,
) -> None:
    """Refuse a Trainer whose other arguments contradict the strategy.

    Raises:
        MisconfigurationException: Says which, and what was expected.

    """
    if num_nodes != 1:
        raise MisconfigurationException(
            f"`FTStrategy` with `Trainer(num_nodes={num_nodes})` is not supported: expected 1, all ranks on one machine."
        )
    num_replicas = 1 if policy.shard_size == "all" else num_devices // policy.shard_size
    if policy.min_replicas > num_replicas:
        sharded = "" if policy.shard_size == 1 else f", shard_size={policy.shard_size!r}"
        raise MisconfigurationException(
            f"`FTStrategy(min_replicas={policy.min_replicas}{sharded})` with `Trainer(devices={num_devices})`: expected 1"
            f"{'' if num_replicas == 1 else f' to {num_replicas}'}."
        )
    if policy.spares and num_devices == 1:
        raise MisconfigurationException(
            f"`FTStrategy(spares={policy.spares})` with `Trainer(devices=1)`: there are no other ranks that could go on"
            " while a spare joins. Use `spares=0`, or more devices."
        )
    if isinstance(environment, _OTHERS_PROCESSES):
        name = type(environment).__name__
        raise MisconfigurationException(
            f"`FTStrategy` with `Trainer(plugins=[{name}()])`: the strategy starts its own ranks, on one machine, but"
            f" under {name} others do. Leave the plugin out, and start the script once."
        )
    if isinstance(precision, _OTHERS_PRECISIONS):
        name = type(precision).__name__
        raise MisconfigurationException(
            f"`FTStrategy` with `Trainer(plugins=[{name}(...)])`: {name} belongs to another strategy."
            " Use `Trainer(precision=...)`."
        )
