"""Shards a module as planned, and runs its methods with its parameters gathered."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn import Module

from lightning_ft.errors import GatheredParametersError
from lightning_ft.sharding._fsdp_compat import abandon_pass, leave_to_root, run_as_forward
from lightning_ft.sharding.full_state import accept_full_state
from lightning_ft.sharding.mesh import sharding_part
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.sharding.plan import Unit
from lightning_ft.sharding.shard_watch import ShardUsed, ShardWatch

log = logging.getLogger(__name__)

_ROUTE = "_lightning_ft_routed"


def apply_plan(
    units: Sequence[Unit],
    mesh: DeviceMesh,
    options: ShardingOptions,
    prepare: Callable[[Unit], None] = lambda unit: None,
    entered: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Shard ``units``, of which the last one is the root; what is sharded already is left as it is.

    Args:
        units: As :func:`plan_units` returns them.
        mesh: Of the replica.
        options: What the user chose.
        prepare: Called with each unit just before it is sharded.
        entered: What is entered for each that is sharded.

    """
    policies: dict[str, Any] = {}
    if options.cpu_offload:
        policies["offload_policy"] = CPUOffloadPolicy()
    for unit in units:
        prepare(unit)
        if options.mp_policy is not None:  # without parameters the root has nothing to cast the batch for
            casts = options.mp_policy.cast_forward_inputs and (unit is not units[-1] or bool(unit.parameters))
            policies["mp_policy"] = replace(options.mp_policy, cast_forward_inputs=casts)
        if not isinstance(unit.module, FSDPModule):
            with entered():
                part = sharding_part(mesh)
                fully_shard(unit.module, mesh=part, reshard_after_forward=options.reshard_after_forward, **policies)
    accept_full_state(units[-1].module)


class ShardedModule:
    """A module whose parameters are sharded over the ranks of a replica.

    Args:
        module: The root, sharded.
        routed: Names of the methods that need the root's parameters.
        reshard_after_forward: As in :class:`ShardingOptions`.
        may_gather_all: Whether all parameters can be gathered while such a method runs.

    """

    def __init__(
        self,
        module: Module,
        routed: Sequence[str],
        *,
        reshard_after_forward: bool | None = None,
        may_gather_all: bool = True,
    ) -> None:
        assert isinstance(module, FSDPModule)
        self.module: Any = module
        self._units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        # What FSDP2 makes of None.
        self._policy = {unit: unit is not module for unit in self._units}
        if reshard_after_forward is not None:
            self._policy = dict.fromkeys(self._units, reshard_after_forward)
        self._may_gather_all = may_gather_all
        self._watch = ShardWatch(only_with_gradients=not may_gather_all)
        self._known_to_work: set[str] = set()
        self._gathers_all = False
        for name in routed:
            _route(module, name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Collective in the replica. Call a method of the module with the parameters that it uses gathered.

        Raises:
            GatheredParametersError: If it used one that is not gathered then.

        """
        if self._gathers_all:
            self._gather_all()
        if name in self._known_to_work:
            return self._run(name, *args, **kwargs)
        random_state = torch.get_rng_state()
        try:
            with self._watch:
                output = self._run(name, *args, **kwargs)
        except ShardUsed as used:
            if self._gathers_all or not self._may_gather_all:
                raise GatheredParametersError(name, used.operation) from None
            log.info("`%s` uses parameters of a submodule without calling it: all are gathered for each step.", name)
            abandon_pass(self.module)
            self._gathers_all = True
            for unit in self._units:
                if unit is not self.module:
                    leave_to_root(unit)
            self.module.register_forward_pre_hook(lambda *_: self._gather_all(), prepend=True)
            torch.set_rng_state(random_state)
            return self.call(name, *args, **kwargs)
        self._known_to_work.add(name)
        return output

    def hold(self) -> None:
        """Collective in the replica. Gather all parameters until :meth:`release`; calls are not collective meanwhile."""
        self.module.set_reshard_after_forward(False, recurse=True)
        self._gather_all()

    def release(self) -> None:
        """Gather parameters for each call again."""
        for unit, flag in self._policy.items():
            unit.set_reshard_after_forward(flag, recurse=False)
        self.let_go()

    def let_go(self) -> None:
        """Let go of gathered parameters: nothing is computed with them before they may change."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside whole and local: they are reduced with the next one."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def recover(self) -> None:
        """Make the module usable again after an exception in the middle of a forward or backward pass."""
        abandon_pass(self.module)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    def _gather_all(self) -> None:
        for unit in self._units:
            unit.unshard()


def _route(module: Module, name: str) -> None:
    """Have a method gather the root's parameters, as ``forward`` does, whoever calls it."""
    method = getattr(module, name)
    if getattr(method, _ROUTE, False):
        return

    @wraps(method)
    def routed(*args: Any, **kwargs: Any) -> Any:
        return run_as_forward(module, method, args, kwargs)

    setattr(routed, _ROUTE, True)
    setattr(module, name, routed)
