"""Every private name of FSDP2 and of DTensor that moves shards to another mesh, checked once.

A torch release that renames one of them is named here, and not in the middle of a recovery.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as _placement_types
from torch.utils._pytree import tree_map_only

__all__ = [
    *("StridedShard", "abandon_pass", "leave_to_root", "managed_parameters", "missing_names", "move_units"),
    *("run_as_forward", "self_test"),
]

StridedShard: Any = getattr(_placement_types, "_StridedShard", None)
"""How a dimension is sharded that is divided by tensor parallelism, too; None in a release that lacks it."""

_PARAM_NAMES = (
    *("_init_sharded_param", "_init_sharded_post_forward_param_metadata", "_init_extensions", "_setattr_on_modules"),
    *("reset_sharded_param",),
)
_GROUP_NAMES = ("_to_sharded", "lazy_init")


@cache
def missing_names() -> tuple[str, ...]:
    """Return what this torch lacks of all that is needed here; nothing in a release that is known."""
    missing = [] if hasattr(FSDPModule, "_get_fsdp_state") else ["FSDPModule._get_fsdp_state"]
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo  # noqa: F401
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: F401
    except ImportError as error:
        return (*missing, str(error))
    missing += [f"FSDPParam.{name}" for name in _PARAM_NAMES if not hasattr(FSDPParam, name)]
    missing += [f"FSDPParamGroup.{name}" for name in _GROUP_NAMES if not hasattr(FSDPParamGroup, name)]
    if not missing and "mesh_info" not in inspect.signature(FSDPParam._init_sharded_param).parameters:
        missing.append("the argument `mesh_info` of FSDPParam._init_sharded_param")
    return tuple(missing)


def abandon_pass(module: nn.Module) -> None:
    """Leave a forward or backward pass that failed: shards are what the parameters are again, gradients are gone."""
    for unit in _units(module):
        for group in _groups(unit):
            group._all_gather_result = None  # the reset would wait for it, and it may have failed
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
                parameter.sharded_param.grad = None
    for unit in _units(module):
        if unit._get_fsdp_state()._is_root:  # None before the first forward pass
            unit.reset_iter_state() if hasattr(unit, "reset_iter_state") else _reset(unit)


def _reset(root: nn.Module) -> None:
    """What ``reset_iter_state`` does, which torch before 2.13 lacks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for unit in _units(root):
        state = unit._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
        for group in _groups(unit):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group._to_sharded()


def run_as_forward(module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective in the replica. Call a method with the parameters of a unit gathered, as FSDP2 does for ``forward``.

    ``register_fsdp_forward_method`` does the same, but if the method calls the unit itself, it lets go of parameters that
    are to stay gathered.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    args, kwargs = state._pre_forward(module, args, kwargs)
    output = method(*args, **kwargs)
    state._training_state = TrainingState.FORWARD  # else a forward pass in the method has ended this one
    for group in _groups(module):
        group._training_state = TrainingState.FORWARD
    return state._post_forward(module, args, output)


def leave_to_root(unit: Any) -> None:
    """Take FSDP2's hooks off a unit that is not the root: it is gathered when it is told to be.

    Its gradients are reduced, and its parameters let go, when the whole backward pass is over, and not already when that has
    passed the unit: they may be used elsewhere.
    """
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    policy = state._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        unit.register_forward_pre_hook(lambda _, *inputs: _cast(inputs, policy.param_dtype), prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        unit.register_forward_hook(lambda _, args, output: _cast(output, policy.output_dtype))


def _cast(nest: Any, dtype: torch.dtype) -> Any:
    """Return ``nest`` with its floating point tensors as ``dtype``."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nest)


def managed_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP2 shards."""
    return (parameter.sharded_param for unit in _units(module) for group in _groups(unit) for parameter in group.fsdp_params)


_positions: dict[int, int] = {}
"""Where this rank was in the meshes for which DTensor worked something out, by their size."""


def _position_in(mesh: DeviceMesh) -> int:
    """Return where this rank was in ``mesh`` when it was made; its group says where it is now."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a mesh without this rank"
    return coordinate[0]


def _forget_placements() -> None:
    """Forget what DTensor worked out for meshes so far: it takes meshes of the same ranks for the same one.

    Results of operations would be on the mesh that it met first. There this rank may have been another one, so that
    whoever asks for the place of a shard in its tensor, such as checkpoints, is told a wrong one.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def move_units(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every FSDP2 unit in ``module`` shards on ``mesh``: the same Parameter objects, their content undefined.

    Args:
        module: What was sharded; in no forward or backward pass.
        mesh: One dimension, which shards.

    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    meshes = [info.mesh for info in _mesh_infos(module)]
    _positions.update((known.size(), _position_in(known)) for known in meshes)
    position = _position_in(mesh)
    # To work it out again takes as long as a few steps.
    is_other_group = any(known.get_group().group_name != mesh.get_group().group_name for known in meshes)
    if is_other_group or _positions.get(mesh.size(), position) != position:
        _forget_placements()
        _positions.clear()
    _positions[mesh.size()] = position
    for unit in _units(module):
        for group in _groups(unit):
            info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
            group.mesh_info = info
            if group.post_forward_mesh_info is not None:
                group.post_forward_mesh_info = info
            group._all_gather_output = torch.empty(0, device=group.device)
            for parameter in group.fsdp_params:
                _move(parameter, info)


def _move(parameter: Any, info: Any) -> None:
    kept, uid, placement = parameter.sharded_param, parameter._orig_param_uid, parameter.fsdp_placement
    local = kept._local_tensor
    full = torch.empty(parameter._orig_size, dtype=local.dtype, device=parameter.device)  # only our part is ever touched
    template = nn.Parameter(full, requires_grad=kept.requires_grad)
    parameter._init_sharded_param(template, parameter.device, lambda _: placement, info)
    parameter._orig_param_uid = uid
    if parameter.post_forward_mesh_info is not None:
        parameter.post_forward_mesh_info = info
        parameter._init_sharded_post_forward_param_metadata(full)
    parameter._init_extensions()
    # As large as the old group: made again by the next all-gather.
    parameter.all_gather_outputs = []
    parameter.__dict__.pop("_unsharded_param", None)
    # The object that optimizers, hooks and the user hold goes on being the parameter. Its size is the whole tensor's, which
    # does not change.
    made = parameter.sharded_param
    kept.grad = None
    kept._local_tensor, kept._spec = made._local_tensor, made._spec
    parameter.sharded_param = kept
    parameter._setattr_on_modules(kept)


def _units(module: nn.Module) -> Iterator[Any]:
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


def _mesh_infos(module: nn.Module) -> Iterator[Any]:
    return (group.mesh_info for unit in _units(module) for group in _groups(unit))


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one a unit, or none
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def self_test(before: DeviceMesh, after: DeviceMesh) -> None:
    """Collective. Check on this torch that a module moved from one mesh to another computes and learns as before.

    Args:
        before: A mesh of one dimension.
        after: Another one, over the same ranks or fewer.

    Raises:
        RuntimeError: Naming what does not work.

    """
    from torch.distributed.fsdp import fully_shard

    if missing := missing_names():
        raise RuntimeError(f"torch {torch.__version__}: {', '.join(missing)} is missing.")
    module = nn.Linear(3, 5, bias=False, device=before.device_type)
    weight, example = module.weight.detach().clone(), torch.ones(2, 3, device=before.device_type)
    fully_shard(module, mesh=before)
    module(example).sum().backward()
    parameter = module.weight
    abandon_pass(module)
    move_units(module, after)
    assert isinstance(module.weight, DTensor)
    rows = weight.chunk(after.size(), dim=0)
    index = after.get_local_rank()
    with torch.no_grad():
        if index < len(rows):
            module.weight.to_local().copy_(rows[index])
    output = module(example)
    output.sum().backward()
    same = module.weight is parameter and torch.equal(output.detach(), example @ weight.T)
    gradient = module.weight.grad
    if not same or gradient is None or not torch.equal(gradient.full_tensor(), torch.full((5, 3), 2.0)):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"torch {torch.__version__}: a module whose shards moved to another mesh computes something else."
        )
