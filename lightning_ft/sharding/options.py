"""What a user can choose about sharding, checked once, here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module

from lightning_ft.elastic.checks import check_count, check_type

UnitPolicy = Callable[[str, Module], bool]
"""Whether the module of this name becomes a unit."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How a replica of several ranks shards its module; the rarer choices.

    A unit is a module whose parameters are gathered together just before it runs. What is in no unit belongs to the root,
    which is gathered for the whole step.

    Args:
        units: Which modules become units. None: repeated blocks, the layers of a transformer. Classes, or their names: the
            modules of these classes. A function of a module's name and the module. An empty list: the root is the only one.
        reshard_after_forward: Whether a unit lets go of its gathered parameters between forward and backward. None: all
            units do, the root does not.
        cpu_offload: Whether shards, gradients and optimizer state stay in host memory. Not for a Trainer on CPU.
        mp_policy: Precision of gathered parameters and of reduced gradients. None: as they are; `precision="bf16-mixed"`
            is autocast, as under ``ddp``. What a unit is called with is cast; the batch is only if the root holds
            parameters by itself.
        memory_snapshot_every_n_steps: Where one replica is all there is (`shard_size="all"`), its state is copied to host
            memory this often, and training goes on from there when a rank dies.

    Raises:
        TypeError: If a value is of the wrong type.

    """

    units: Sequence[type[Module] | str] | UnitPolicy | None = None
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False
    mp_policy: MixedPrecisionPolicy | None = None
    memory_snapshot_every_n_steps: int = 10

    def __post_init__(self) -> None:
        call = "ShardingOptions"
        if not (self.units is None or callable(self.units) or _are_classes(self.units)):
            raise TypeError(
                f"`ShardingOptions(units={self.units!r})` is not valid: expected a list of classes of modules or of their"
                " names, a function of a module's name and the module, or None."
            )
        if self.reshard_after_forward is not None:
            expected = "True, False or None; a number of ranks to share them among meanwhile is not supported"
            check_type(call, "reshard_after_forward", self.reshard_after_forward, bool, expected)
        check_count(call, "memory_snapshot_every_n_steps", self.memory_snapshot_every_n_steps, least=1)
        check_type(call, "cpu_offload", self.cpu_offload, bool, "True or False")
        if self.mp_policy is not None:
            check_type(call, "mp_policy", self.mp_policy, MixedPrecisionPolicy, "a `MixedPrecisionPolicy`, or None")

    @property
    def casts(self) -> bool:
        """Whether units compute in another precision than parameters have, and cast what they are called with."""
        policy = self.mp_policy
        return policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs


def _are_classes(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, str) or (isinstance(value, type) and issubclass(value, Module)) for value in values)
    )
