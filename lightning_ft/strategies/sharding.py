"""Shards the module of a Trainer call over the ranks of each replica, and what belongs to it: copies, optimizers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_ft.sharding.apply import ShardedModule, apply_plan
from lightning_ft.sharding.full_state import accept_full_optimizer_state
from lightning_ft.sharding.materialize import MakeAlike, materialize
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.sharding.plan import Unit, plan_units
from lightning_ft.strategies.gradient_norms import understand_shards
from lightning_ft.strategies.own_sharding import check_own_shards, list_names
from lightning_ft.strategies.sparse_gradients import sparse_parameters

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def resolve_shard_size(shard_size: int | str, num_devices: int, tensor_parallel_size: int = 1) -> int:
    """Return how many ranks a replica has.

    Raises:
        MisconfigurationException: If the devices can't be divided into replicas of that size, or these into rows of
            ``tensor_parallel_size``.

    """
    size = num_devices if shard_size == "all" else 1 if shard_size == "auto" else int(shard_size)
    if num_devices % size:
        sizes = [str(number) for number in range(1, num_devices + 1) if num_devices % number == 0]
        raise MisconfigurationException(
            f"`FTStrategy(shard_size={size})` does not divide the {num_devices} devices. Use {', '.join(sizes[:-1])} or"
            f" {sizes[-1]}."
        )
    if size % tensor_parallel_size:
        raise MisconfigurationException(
            f"`FTStrategy(shard_size={shard_size!r}, tensor_parallel_size={tensor_parallel_size})`: the {size} ranks of a"
            f" replica can't be divided into groups of {tensor_parallel_size} that work on one batch together. Use a"
            f" `shard_size` of which it is a divisor, such as {size * tensor_parallel_size}."
        )
    return size


class ReplicaSharding:
    """How modules are sharded in this job.

    Args:
        shard_size: Ranks of a replica.
        options: What the user chose.
        tensor_parallel_size: How many of them work on one batch together.

    """

    def __init__(self, shard_size: int, options: ShardingOptions, tensor_parallel_size: int = 1) -> None:
        more = f", tensor_parallel_size={tensor_parallel_size}" if tensor_parallel_size > 1 else ""
        self._call = f"FTStrategy(shard_size={shard_size}{more})"
        self._options = options

    def cancel_saves_on_exceptions(self, trainer: Trainer) -> None:
        """Have no callback try to save, and say that it did, when no rank has the whole state by itself."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
                callback.save_on_exception = False
                rank_zero_warn(
                    f"`{type(callback).__name__}(save_on_exception=True)` is switched off by `{self._call}`: after an"
                    " exception no rank has the whole state. Save regularly: `AsyncCheckpoint(every_n_train_steps=...)`."
                )

    def shard(
        self,
        module: LightningModule,
        mesh: DeviceMesh,
        make_alike: MakeAlike,
        entered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> ShardedModule:
        """Collective. Shard ``module`` unless it is already, with the parameters and buffers of rank 0.

        Args:
            module: The module.
            mesh: Of this rank's replica.
            make_alike: Gives all ranks the tensors of rank 0.
            entered: What is entered while torch shards a part of it.

        Raises:
            MisconfigurationException: If it can't be.

        """
        understand_shards()
        by_hand = not module.automatic_optimization
        units = plan_units(module, self._options, by_hand=by_hand)
        self._check(module, units, mesh, by_hand=by_hand)
        device = torch.device(mesh.device_type)

        def prepare(unit: Unit) -> None:
            materialize(unit, device, make_alike)
            plain = [p for p in unit.parameters.values() if not isinstance(p, DTensor)]
            buffers = unit.module.buffers() if unit.module is module else ()
            make_alike([*plain, *(buffer for buffer in buffers if not isinstance(buffer, DTensor))])

        apply_plan(units, mesh, self._options, prepare, entered)
        sharded = ShardedModule(module, STEPS, may_gather_all=not by_hand)
        sharded.let_go()  # a call before this one may have left parameters gathered
        return sharded

    def shard_copies(
        self,
        trainer: Trainer,
        module: LightningModule,
        mesh: DeviceMesh,
        entered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Shard the copies that averaging callbacks made of ``module``, in the same way."""
        for copy in averaged_copies(trainer):
            by_hand = not module.automatic_optimization
            apply_plan(plan_units(copy, self._options, by_hand=by_hand), mesh, self._options, entered=entered)

    def take_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers load what was saved whole.

        Raises:
            MisconfigurationException: If one of them can't step sharded parameters.

        """
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                raise MisconfigurationException(
                    f"`{self._call}` with {type(optimizer).__name__}, which handles all parameters as one vector: they can't"
                    " be sharded. Use `FTStrategy(shard_size=1)`, or another optimizer."
                )
            accept_full_optimizer_state(optimizer)

    def _check(self, module: LightningModule, units: Sequence[Unit], mesh: DeviceMesh, *, by_hand: bool) -> None:
        check_own_shards(module, mesh, self._call)
        root = units[-1]
        if by_hand and root.parameters:
            raise MisconfigurationException(
                f"`{self._call}` with manual optimization: {list_names(root.parameters)} can't be gathered for the whole"
                " training step, in which optimizers change them. Move them into a submodule that `training_step` calls,"
                " or use `FTStrategy(shard_size=1)`."
            )
        if scalars := [name for unit in units for name, parameter in unit.parameters.items() if parameter.dim() == 0]:
            raise MisconfigurationException(
                f"`{self._call}`: {list_names(scalars)} can't be sharded, being of no dimension. Make each a tensor of one"
                " element, `torch.nn.Parameter(value.reshape(1))`, or use `FTStrategy(shard_size=1)`."
            )
        if any(isinstance(callback, ModelPruning) for callback in getattr(module._trainer, "callbacks", ())):
            raise MisconfigurationException(
                f"`{self._call}` with `ModelPruning`, whose masks are for whole parameters: shards can't be pruned. Use"
                " `FTStrategy(shard_size=1)`."
            )
        if sparse_parameters(module):
            raise MisconfigurationException(
                f"`{self._call}` with sparse gradients: they can't be sharded. Use `sparse=False` in the embedding, or"
                " `FTStrategy(shard_size=1)`."
            )
        for unit in units:
            kinds = {parameter.dtype for parameter in unit.parameters.values() if parameter.requires_grad}
            if len(kinds) > 1:
                where = f"module {unit.name!r}" if unit.name else "the module"
                raise MisconfigurationException(
                    f"`{self._call}`: parameters of {where} have several dtypes ({', '.join(sorted(map(str, kinds)))}), but"
                    " those that are gathered together must have one. Name the class of the modules that differ in"
                    " `FTStrategy(sharding=ShardingOptions(units=[...]))`, or use `FTStrategy(shard_size=1)`."
                )
        if self._options.cpu_offload and mesh.device_type == "cpu":
            raise MisconfigurationException(
                "`ShardingOptions(cpu_offload=True)` with `Trainer(accelerator='cpu')`: parameters are in host memory"
                " anyway. Use `cpu_offload=False`."
            )


def averaged_copies(trainer: Trainer) -> Iterator[Module]:
    """Yield the copies of the module in which Lightning's callbacks average its weights."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        copy = getattr(callback, "_average_model", None)
        if isinstance(copy, Module):
            yield copy.module if isinstance(copy, AveragedModel) else copy
