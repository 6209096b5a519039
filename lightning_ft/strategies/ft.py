"""FTStrategy: Lightning's Strategy contract on an elastic engine, a few lines a method."""

import os
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.peers import Peers
from lightning_ft.checkpoint.store_path import place
from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.workers import shield_workers
from lightning_ft.elastic.checks import check_choice, check_count, check_type
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Change, Engine, SoloEngine
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.options import Policy, SupervisionOptions
from lightning_ft.elastic.process_group import install_once
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.elastic.raised import describe_exception
from lightning_ft.events.log import EventLog
from lightning_ft.sharding.apply import ShardedModule
from lightning_ft.sharding.describe import describe_units
from lightning_ft.sharding.full_state import gather_full
from lightning_ft.sharding.mesh import at_its_ranks, replica_mesh
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.sharding.plan import plan_units
from lightning_ft.sharding.sizes import fewest_ranks, training_bytes
from lightning_ft.sharding.warming import warm_up
from lightning_ft.strategies import joining, tuning
from lightning_ft.strategies.alike_shards import draw_alike, make_shards_alike
from lightning_ft.strategies.begun_anew import BegunAnew, remember_checkpoints, remember_loggers
from lightning_ft.strategies.buffers import BufferSync
from lightning_ft.strategies.checkpoint_peers import checkpoint_peers, holds_whole_state
from lightning_ft.strategies.clipping import clip_shards_with
from lightning_ft.strategies.combinations import check_combination
from lightning_ft.strategies.data_shares import DataShares
from lightning_ft.strategies.files import write_atomically
from lightning_ft.strategies.launcher import ElasticLauncher
from lightning_ft.strategies.live_ranks import LiveRanks
from lightning_ft.strategies.live_training import LiveTraining
from lightning_ft.strategies.module_parameters import ModuleParameters
from lightning_ft.strategies.own_sharding import check_own_shards, explaining_dimensions
from lightning_ft.strategies.prepare_data import prepare_data_elastically
from lightning_ft.strategies.reduction import GradientReducer
from lightning_ft.strategies.replica_memory import ReplicaMemory
from lightning_ft.strategies.sharded_evaluation import ShardedEvaluation
from lightning_ft.strategies.sharded_reduction import ShardedReducer
from lightning_ft.strategies.sharding import ReplicaSharding, resolve_shard_size
from lightning_ft.strategies.sparse_gradients import sparse_parameters
from lightning_ft.strategies.startup import StartupRecord
from lightning_ft.strategies.step_checks import check_step_output
from lightning_ft.strategies.steps import TrainingSteps
from lightning_ft.strategies.training_data import TrainingData
from lightning_ft.supervision.other_launchers import other_launcher
from lightning_ft.trainer.event_log import REFERENCE, event_directory, refer, tell_resumed
from lightning_ft.trainer.saved_directory import save_directory, wants_directory
from lightning_ft.trainer.verified_resume import VerifiedResume


class FTStrategy(LiveRanks):
    """Data-parallel training that outlives the death of any rank.

    When a rank dies, the survivors leave its gradient out of the average of that very step and go on; the rank is started
    again, receives the state of a live one and joins at a batch boundary. A LightningModule that trains under ``ddp``
    trains under this strategy unchanged, and what it computes without faults is the same.

    Args:
        max_restarts: How often a rank's slot is started again within ``SupervisionOptions.restart_window``;
            0: a rank that dies stays away.
        min_replicas: With fewer live ranks than this, training waits for respawns after the step under way.
        timeout: How long a rank may keep the others waiting in one step, one evaluation step or one callback; seconds if
            a number. After that it is taken for hung: it is killed and started again. Default: five times the longest
            wait seen for the same kind of work; at least a minute in a step and 30 minutes elsewhere. Set-up and
            checkpoints have limits of their own in ``supervision``.
        spares: Processes that are kept waiting at the Trainer call to take a dead rank's place at once; without them a
            rank's next process first runs the script up to there.
        global_batch: What a step trains while ranks are missing. ``"shrink"``: the batches of the live ones; what is left
            comes at the end of the epoch, which has more steps. ``"constant"``: those of the missing ones, too, in
            further passes of the same step, so that the training takes the steps that it would take without faults.
        find_unused_parameters: Whether a step may leave parameters without a gradient. If not, automatic optimization
            raises when one does, as ``ddp`` would; finding them costs nothing here.
        shard_size: Ranks that together hold one copy of the model, a replica; "all": all of them. 1: each rank holds one.
            "auto": as few as hold it with gradients and optimizer state in the memory of their devices.
        tensor_parallel_size: How many of these work on one batch together, for modules that use
            ``self.device_mesh["tensor_parallel"]`` in ``configure_model``.
        sharding: How a replica of several ranks shards the module; the rarer options.
        supervision: The rarer options of the supervisor.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: If this process is one of several that another launcher started.

    Example::

        trainer = Trainer(devices=4, strategy=FTStrategy())

    """

    strategy_name = "ft"

    def __init__(
        self,
        shard_size: int | Literal["auto", "all"] = 1,
        *,
        tensor_parallel_size: int = 1,
        max_restarts: int = 3,
        min_replicas: int = 1,
        timeout: timedelta | float | None = None,
        spares: int = 0,
        global_batch: Literal["shrink", "constant"] = "shrink",
        find_unused_parameters: bool = False,
        sharding: ShardingOptions | None = None,
        supervision: SupervisionOptions | None = None,
    ) -> None:
        super().__init__()
        if RankEnvironment.of_process() is None and (obstacle := other_launcher(os.environ)) is not None:
            raise MisconfigurationException(obstacle)
        supervision = SupervisionOptions() if supervision is None else supervision
        check_type("FTStrategy", "supervision", supervision, SupervisionOptions, "`SupervisionOptions(...)`, or None")
        check_choice("FTStrategy", "global_batch", global_batch, ("shrink", "constant"))
        check_type("FTStrategy", "find_unused_parameters", find_unused_parameters, bool, "True or False")
        sharding = ShardingOptions() if sharding is None else sharding
        check_type("FTStrategy", "sharding", sharding, ShardingOptions, "`ShardingOptions(...)`, or None")
        if shard_size not in ("auto", "all"):
            check_count("FTStrategy", "shard_size", shard_size, least=1)
        check_count("FTStrategy", "tensor_parallel_size", tensor_parallel_size, least=1)
        self._shard_size = shard_size
        self._tensor_parallel_size = tensor_parallel_size
        self._sharding_options = sharding
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._policy = Policy.of(
            supervision,
            max_restarts=max_restarts,
            min_replicas=min_replicas,
            timeout=seconds,
            spares=spares,
        )
        # By itself a rank gives up only after the supervisor must have acted.
        self._timeout = timedelta(seconds=2 * max(self._policy.stall_timeout, seconds or 0.0))
        self._find_unused_parameters = find_unused_parameters
        self._constant_batch = global_batch == "constant"
        self.events = EventLog(slot=0, incarnation=0)
        self.event_directory: Path | None = None
        self._resumed: tuple[_PATH, dict[str, Any], int] | None = None
        self.attempt = 0
        """How many runs this one goes on from, one after the other."""
        self.sharded: ShardedModule | None = None
        """The module, if it is sharded over several ranks."""
        self._sharding: ReplicaSharding | None = None
        self._unloaded: tuple[Mapping[str, Any], bool] | None = None
        self._evaluation: ShardedEvaluation | None = None
        self._anew: BegunAnew | None = None
        self._live: LiveTraining | None = None
        self._steps: TrainingSteps | None = None

    # Ranks.

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        slots, own = self._live.slots if self._live is not None else (), DataShares(self.engine).own
        if own in slots:
            return {"num_replicas": len(slots), "rank": slots.index(own)}
        count = self.world_size // self._tensor_parallel_size
        return {"num_replicas": count, "rank": min(self.global_rank // self._tensor_parallel_size, count - 1)}

    @property
    def num_changes(self) -> int:
        """How often the ranks agreed in this call that others take part; it grows at the same batch on all of them."""
        return 0 if self._live is None else self._live.num_changes

    @property
    def has_joined(self) -> bool:
        """Whether this process is about to take part in a training that is under way, with the state of a live rank."""
        return self._live is not None and self._live.has_received

    @property
    def has_own_batch(self) -> bool:
        """Whether the training step under way counts; otherwise this rank only keeps the others company."""
        return self._live is None or self._live.has_own_batch

    def describe(self, model: Module, devices: int | None = None) -> str:
        """Return a table of the units in which ``model`` is sharded, their parameters, and the bytes that a rank holds.

        Args:
            model: A module that is not sharded yet.
            devices: Number of ranks, if no Trainer has this strategy yet.

        """
        by_hand = not getattr(model, "automatic_optimization", True)
        units = plan_units(model, self._sharding_options, by_hand=by_hand)
        size = self._shard_size
        if not isinstance(size, int):
            size = self._resolve_shard_size(model, devices or self.num_processes)
        return describe_units(units, size)

    # Start.

    @override
    def _configure_launcher(self) -> None:
        if self._shard_size != "auto":
            size = resolve_shard_size(self._shard_size, self.num_processes, self._tensor_parallel_size)
            self._divide_into_replicas(size)
        check_combination(
            self._policy,
            num_nodes=self.num_nodes,
            num_devices=self.num_processes,
            environment=self.cluster_environment,
            precision=self.precision_plugin,
        )
        self._launcher = ElasticLauncher(
            self.num_processes,
            self._policy.start_method,
            self._start_engine,
            lambda: None if self._live is None else self._live.preemption,
            self._begin_anew,
        )

    def _resolve_shard_size(self, model: Module, num_devices: int) -> int:
        if self._shard_size != "auto":
            return resolve_shard_size(self._shard_size, num_devices)
        if self.parallel_devices is None or self.root_device.type != "cuda":
            return 1  # host memory is shared
        memory = torch.cuda.get_device_properties(self.root_device).total_memory
        return fewest_ranks(training_bytes(model), memory, num_devices)

    def _divide_into_replicas(self, shard_size: int) -> None:
        # The only replica is whatever is alive, however many ranks that are: otherwise its first death would be its end.
        # But what is divided by tensor parallelism can't be divided anew: then all begin again from the newest checkpoint.
        rows = self._tensor_parallel_size
        is_all = rows == 1 and (self._shard_size == "all" or 1 < shard_size == self.num_processes)
        self._policy = replace(self._policy, shard_size="all" if is_all else shard_size, tensor_parallel_size=rows)
        if shard_size > 1:
            self._sharding = ReplicaSharding(shard_size, self._sharding_options, rows)
        if rows > 1 and self._constant_batch:
            raise MisconfigurationException(
                '`FTStrategy(global_batch="constant")` with tensor parallelism, whose ranks share their batches, is not'
                ' supported. Use `global_batch="shrink"`.'
            )

    def _start_engine(self, environment: RankEnvironment | None) -> Engine:
        """Return the engine of this process, started at its first Trainer call, for a call of this strategy's."""
        if self._shard_size == "auto":
            assert self.lightning_module is not None
            size = self._resolve_shard_size(self.lightning_module, self.num_processes)
            self._divide_into_replicas(resolve_shard_size(size, self.num_processes, self._tensor_parallel_size))
        if environment is not None:
            self.engine = engine = LocalEngine.of_process(environment, self._policy, self._timeout)
            self.events = engine.events
            self.collectives = Collectives(engine)
            install_once(engine, self.collectives)
            remember_checkpoints(engine)
        self._anew, self._startup = None, StartupRecord(self.engine)
        self.engine.on_change = self._on_change
        return self.engine

    def _begin_anew(self, fn: str, ckpt_path: Any) -> Any:
        assert isinstance(self.engine, LocalEngine)
        self._anew, self._startup.again = BegunAnew(self.engine, fn, ckpt_path), True
        return self._anew.ckpt_path

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._anew is not None:
            self._anew.continue_loggers(trainer, self.lightning_module)
        # Here, and not in `setup`: the module's own `setup` may ask for the loaders, or for their length.
        if self._sharding is not None:  # a module may shard itself, in `configure_model`
            self.lightning_module._device_mesh = replica_mesh(self.engine, self.root_device.type)
        self._live = LiveTraining(
            trainer,
            self.lightning_module,
            self.engine,
            self.collectives,
            self.events,
            self._startup,
            constant_batch=self._constant_batch and not isinstance(self.engine, SoloEngine),
        )
        self._live.stops_for_streams = self._policy.lost_streams == "stop"
        self._live.from_memory = self._anew is not None and self._anew.from_memory
        self._live.data = TrainingData(
            trainer,
            self.engine,
            self._startup,
            self.broadcast,
            constant_batch=self._constant_batch,
            takes_over=self._policy.lost_streams == "take_over",
        )
        self._live.data.watch_source()
        if not isinstance(self.engine, SoloEngine):
            prepare_data_elastically(trainer, self.collectives, lambda: self.is_global_zero)
            if self._sharding is None:  # else a replica evaluates together
                self._live.watch_evaluation()
        VerifiedResume.of(trainer)
        if not self.engine.alone:
            self._live.agree_on_slots()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with explaining_dimensions(f"FTStrategy(shard_size={self._shard_size!r})"), self._at_its_ranks():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        assert self._live is not None
        self._live.preemption.listen()
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        if self._sharding is None:
            check_own_shards(self.lightning_module, None, f"FTStrategy(shard_size={self._shard_size!r})")
            self.model_to_device()
            self._make_alike([*self.model.parameters(), *self.model.buffers()])
        else:
            self._shard(trainer, self._sharding, self._live)
        if self._anew is not None:
            mesh = None if self.sharded is None else replica_mesh(self.engine, self.root_device.type)
            self._anew.give_back(self.lightning_module, mesh)
        if fitting:
            self._steps = self._make_steps(self._live)
            self.setup_optimizers(trainer)
            if self._sharding is not None:
                self._sharding.take_in(self.optimizers)
                self._live.memory = self._make_memory(trainer, self._live)
            if self._live.extra is not None:
                self._live.extra.check()
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._live.enter()
        self._open_event_log(trainer)
        if fitting:
            self._tell_begin(trainer)
        if fitting and self._is_joiner:
            # Here, and not after `on_fit_start`: callbacks expect in that hook what they saved.
            trainer._checkpoint_connector._restore_modules_and_callbacks(joining.PEER_CHECKPOINT)

    def _shard(self, trainer: Trainer, sharding: ReplicaSharding, live: LiveTraining) -> None:
        """Collective. Shard the module, and the copies that callbacks made of it."""
        assert self.lightning_module is not None
        mesh = replica_mesh(self.engine, self.root_device.type)
        if self._is_joiner:
            warm_up(self.engine.shard_group, mesh.device_type)
        self.sharded = sharding.shard(self.lightning_module, mesh, self._make_alike, self._at_its_ranks)
        if is_overridden("configure_model", self.lightning_module):
            make_shards_alike(self.engine, list(self.lightning_module.parameters()))
        unloaded, self._unloaded = self._unloaded, None
        if unloaded is not None:
            super().load_model_state_dict(*unloaded)
        sharding.shard_copies(trainer, self.lightning_module, mesh, self._at_its_ranks)
        sharding.cancel_saves_on_exceptions(trainer)
        can_regroup = self._policy.shard_size != "all"
        if self.engine.rows is not None:
            can_regroup = False
            draw_alike(self.engine.rows)
            clip_shards_with(self.precision_plugin)
        self._evaluation = ShardedEvaluation(live, self.sharded, self.engine, self.collectives, can_regroup=can_regroup)

    def _at_its_ranks(self) -> AbstractContextManager[None]:
        if self._sharding is None:
            return nullcontext()
        return at_its_ranks(self.engine, replica_mesh(self.engine, self.root_device.type))

    def _make_steps(self, live: LiveTraining) -> TrainingSteps:
        assert self.model is not None
        assert self.lightning_module is not None
        parameters = ModuleParameters(self.model)
        reduce = GradientReducer if self.sharded is None else ShardedReducer
        live.reducer = reducer = reduce(parameters, self.engine, sparse=sparse_parameters(self.model))
        live.buffers = BufferSync(self.model, self.collectives)
        steps = TrainingSteps(
            self.lightning_module,
            parameters,
            reducer,
            live,
            self.engine,
            self.collectives,
            find_unused_parameters=self._find_unused_parameters,
            recover=None if self.sharded is None else self.sharded.recover,
        )
        if live.extra is not None:
            reducer.covers = live.extra.covers
        live.on_batch_end, live.may_pause = steps.end_batch, lambda: steps.may_pause
        live.on_abandon = steps.abandon
        steps.enter()
        return steps

    def _make_memory(self, trainer: Trainer, live: LiveTraining) -> ReplicaMemory | None:
        if self._policy.shard_size != "all" or not isinstance(self.engine, LocalEngine):
            return None
        assert isinstance(live.reducer, ShardedReducer)
        return ReplicaMemory.of_process(
            trainer,
            self.engine,
            self.collectives,
            self.events,
            every_n_steps=self._sharding_options.memory_snapshot_every_n_steps,
            on_move=live.reducer.resized,
        )

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _make_alike(self, tensors: Sequence[Tensor]) -> None:
        """Collective. Give all ranks the parameters and buffers of rank 0, as ``ddp`` does."""
        for tensor, value in zip(tensors, self.collectives.broadcast_tensors(tensors, label="module"), strict=True):
            tensor.detach().copy_(value)

    def _tell_begin(self, trainer: Trainer) -> None:
        if self._is_joiner:
            return
        if self.is_global_zero:
            remember_loggers(self.engine, trainer)
        if self._anew is not None:
            resumed = None if self._resumed is None else (self._resumed[0], self._resumed[2])
            self._anew.tell(self.events, resumed, is_leader=self.is_global_zero)
        if self._resumed is not None:  # told here, where this fit's own log is open
            self.attempt, self._resumed = tell_resumed(self.events, *self._resumed), None
        self.events.emit("fit")

    def _open_event_log(self, trainer: Trainer) -> None:
        if isinstance(self.engine, LocalEngine):
            self.event_directory = event_directory(trainer, self.engine.run_id)
            self.events.open(self.event_directory)
            self.engine.report_log(str(self.event_directory))

    # Data.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._live is not None
        assert self._live.data is not None
        trainer = self._live.trainer
        if isinstance(self.engine, SoloEngine) and not (trainer.training and self._live.data.deals_out(dataloader)):
            return dataloader
        if trainer.training:
            dataloader = self._live.follow_loader(dataloader)
        else:
            self._live.shards.add(dataloader)
            rank = self.global_rank // self._tensor_parallel_size
            _auto_add_worker_init_fn(dataloader, rank)  # Lightning would, but sees no room for it afterwards
        shield_workers(dataloader)
        return dataloader

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._is_joiner and not (self._live is not None and self._live.has_received)

    @property
    def _is_joiner(self) -> bool:
        """Whether the state that this process goes on with is that of a training under way."""
        is_coming = self.engine.alone and not isinstance(self.engine, SoloEngine)
        return is_coming or (self._live is not None and self._live.from_memory)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._live is not None
        if str(checkpoint_path) == joining.PEER_CHECKPOINT:
            return self._live.receive()
        if place(checkpoint_path).is_dir():
            checkpoint = read_checkpoint(os.fspath(checkpoint_path), weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._live.trainer.state.fn == TrainerFn.FITTING and not tuning.is_searching(self._live.trainer):
            path = VerifiedResume.of(self._live.trainer).loading or checkpoint_path
            self._resumed = (path, checkpoint.get(REFERENCE) or {}, checkpoint.get("global_step", 0))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        is_ready = self.sharded is not None and self.sharded.module is module
        if self._sharding is not None and is_overridden("configure_model", module) and not is_ready:
            self._unloaded = checkpoint, strict  # until `setup` has it take whole tensors: it may be divided, or empty
        else:
            super().load_model_state_dict(checkpoint, strict)

    def _on_change(self, change: Change) -> None:
        self.set_world_ranks()
        if self._live is not None:
            self._live.after_change(change)

    # Steps.

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.engine.activity.enter("callbacks")  # the loader is done
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self.engine.activity.enter("training step")
        extra = None if self._live is None else self._live.extra
        if extra is None or not extra.is_running:
            self._before_forward()
            if extra is not None:
                extra.begin_step()
        if self.sharded is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            output: STEP_OUTPUT = self.sharded.call("training_step", *args, **kwargs)
        return check_step_output(self.lightning_module, output)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._before_evaluation_batch()
        if self._evaluation is None:
            self._before_forward()
        with self.engine.activity.during("evaluation step"):
            if self._evaluation is None:
                return super().validation_step(*args, **kwargs)
            with self.precision_plugin.val_step_context():
                output: STEP_OUTPUT = self._evaluation.step("validation_step", *args, **kwargs)
                return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._before_evaluation_batch()
        with self.engine.activity.during("evaluation step"):
            if self._evaluation is None:
                return super().test_step(*args, **kwargs)
            with self.precision_plugin.test_step_context():
                output: STEP_OUTPUT = self._evaluation.step("test_step", *args, **kwargs)
                return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_batch()
        with self.engine.activity.during("evaluation step"):
            if self._evaluation is None:
                return super().predict_step(*args, **kwargs)
            with self.precision_plugin.predict_step_context():
                return self._evaluation.step("predict_step", *args, **kwargs)

    def _begin_evaluation(self) -> None:
        """Collective. Agree on how the parameters of a sharded module are gathered in this pass."""
        if self._evaluation is not None:
            self._evaluation.begin()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

    @override
    def on_validation_end(self) -> None:
        """Collective. Nobody trains on while others may still break off this validation."""
        self._end_evaluation()
        if self._live is not None and self._live.trainer.state.fn == TrainerFn.FITTING:
            self._live.preemption.after_validation()

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()

    on_test_end = on_predict_end = _end_evaluation

    def _before_evaluation_batch(self) -> None:
        if self._live is not None and self._evaluation is None:  # else its ranks break off together
            self._live.preemption.before_evaluation_batch()

    def _before_forward(self) -> None:
        if self._live is not None and self._live.buffers is not None:
            assert self._steps is not None
            self._live.buffers.before_forward(synchronize_gradients=self._steps.synchronizes_buffers)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self._steps is not None
        with self._steps.without_synchronization(), nullcontext() if self.sharded is None else self.sharded.accumulating():
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        assert self._steps is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._steps.backward(closure_loss) as loss:
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self._steps is not None
        output = super().optimizer_step(optimizer, self._steps.wrap(optimizer, closure), model, **kwargs)
        self._steps.stepped()
        return output

    def check_gradients_with(self, check: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        """Have gradients judged before they are applied; for callbacks, once a fit has started.

        Args:
            check: Gets what runs the last forward and backward pass of a step and leaves averaged gradients; returns what
                is to run instead. That may run it again, after any earlier passes of the step, and put None in the place
                of gradients that are not to be applied, all that alike on all ranks.

        Raises:
            MisconfigurationException: If passes of a step may stand for missing ranks.

        """
        if self._constant_batch:
            raise MisconfigurationException(
                '`FTStrategy(global_batch="constant")` does not run steps again, since a step may have passes of missing'
                ' ranks in it. Use `global_batch="shrink"`.'
            )
        assert self._steps is not None
        self._steps.checked = check

    def look_at_own_gradients_with(self, look: Callable[[Tensor | None], None] | None) -> None:
        """Have ``look`` called in each reduction of a module that is not sharded, while its messages are under way.

        ``p.grad`` is this rank's own then, of all batches of the step. It gets the norm of that, if it is known by then.
        """
        if self._steps is not None:
            self._steps.look_with(look)

    def take_average_norm(self) -> Tensor | None:
        """Return, once for each reduction that was looked at, the norm of the gradient; None if it is not known."""
        assert self._steps is not None
        return self._steps.take_average_norm()

    @contextmanager
    def aside(self) -> Generator[None, None, None]:
        """While this is entered, passes are nobody's: nothing is counted, nor averaged over replicas, no gradient stays.

        With sharded modules gradients do stay; a pass with synchronization has those of its replica.
        """
        assert self._steps is not None
        assert self._live is not None
        assert self._live.buffers is not None
        due = self._live.buffers.due
        try:
            with self._steps.aside():
                yield
        finally:
            self._live.buffers.due = due

    @property
    def window(self) -> list[bool] | None:
        """Which batches were accumulated since the last step, and whether each counts on this rank; for checkpoints.

        None if another fit can't go on within a window: with ``shard_size`` above 1, a constant global batch, manual
        optimization or streams. It begins the window again.
        """
        if self._steps is None or self._live is None or not isinstance(self._live.loader, ElasticLoader):
            return None
        return self._steps.window

    def enter_window(self, window: Sequence[bool]) -> None:
        """Go on, alike on all ranks, within a window whose gradients every rank has again."""
        assert self._steps is not None
        self._steps.take_up(window)

    def average_anew(self) -> None:
        """Say, alike on all ranks, that the step is run again: the next average is the one that counts.

        Batches of ranks that were in an average before and are not in that one are open again.
        """
        assert self._live is not None
        self._live.averages_anew = True

    @contextmanager
    def as_batch(self, is_own: bool) -> Generator[None, None, None]:
        """While this is entered, an earlier batch of the step is run again, which counts on this rank or does not."""
        assert self._live is not None
        with self._live.as_batch(is_own):
            yield

    @contextmanager
    def repeating(self) -> Generator[Callable[[Callable[[], Any]], Callable[[], Any]], None, None]:
        """Collective. While this is entered, whole steps are run again that are over: nothing follows from their averages.

        Yields what wraps the last pass of each.
        """
        assert self._steps is not None
        with self._steps.repeating() as averaged:
            yield averaged

    @property
    def averaged_over(self) -> tuple[int, ...]:
        """Slots whose gradients are in the newest average."""
        assert self._steps is not None
        return self._steps.averaged_over

    @property
    def sends_buffers(self) -> bool:
        """Whether the next forward pass begins with the buffers of rank 0; may be set, alike on all ranks."""
        return self._live is not None and self._live.buffers is not None and self._live.buffers.due

    @sends_buffers.setter
    def sends_buffers(self, sends: bool) -> None:
        if self._live is not None and self._live.buffers is not None:
            self._live.buffers.due = sends

    # Collectives.

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """Collective. Return the objects of all live ranks, by rank.

        None while a checkpoint is made for a rank that joins: that rank gets its state from this one alone.
        """
        if self._live is not None and self._live.is_handing_out:
            return None
        packed = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        return [pickle.loads(row.numpy().tobytes()) for row in self.collectives.all_gather_ragged(packed)]

    # Checkpoints.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._evaluation is not None and self._live is not None and self._live.preemption.agreed:
            self._evaluation.end()  # it was broken off, perhaps with gathered parameters
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Collective. Rank 0 writes, whole or not at all; if it dies in it, the next rank 0 writes.

        A path that ends with ``/``, or is a directory, becomes a directory that all ranks write, as `AsyncCheckpoint` does.
        """
        assert self.lightning_module is not None
        refer(self.lightning_module.trainer, checkpoint)
        if wants_directory(filepath):
            with self.engine.activity.during("checkpoint"):
                save_directory(self.lightning_module.trainer, checkpoint, filepath, self.checkpoint_peers())
            self._tell_saved(filepath, checkpoint)
            return
        if not holds_whole_state(self.engine):
            return
        if self._sharding is not None:  # also after the call, when `sharded` is None
            checkpoint = gather_full(checkpoint, keep=self.engine.replica.index == 0)
        written = False
        while not written:
            if self.is_global_zero:
                with self.engine.activity.during("checkpoint"):
                    write_atomically(self.checkpoint_io, checkpoint, filepath, storage_options)
            written = self.collectives.count(self.is_global_zero)[0] > 0 or self.engine.alone
        self._tell_saved(filepath, checkpoint)

    def _tell_saved(self, filepath: _PATH, checkpoint: dict[str, Any]) -> None:
        kind = {} if "optimizer_states" in checkpoint else {"weights_only": True}
        self.events.emit("checkpoint", path=str(place(filepath)), step=checkpoint.get("global_step", 0), **kind)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        self.events.emit("checkpoint_removed", path=str(place(filepath)))

    def checkpoint_peers(self) -> Peers:
        """Return the live ranks as those who save checkpoints together; for checkpoint callbacks."""
        return checkpoint_peers(self.engine, self.collectives)

    # End.

    @override
    def on_exception(self, exception: BaseException) -> None:
        raised = describe_exception(exception, 1)
        self.events.emit("exception", type=raised["exception"], message=raised["message"][:500])

    @override
    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.close()
            assert self._live is not None
            trainer, is_whole = self._live.trainer, self._live.is_last_batch
            self.events.emit("fit_end", step=trainer.global_step, epoch=trainer.current_epoch, whole=is_whole)
        self._steps = self._evaluation = None
        if self._live is not None and self._live.loader is not None:
            self._live.loader.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name in (cls.strategy_name, f"{cls.__module__}.{cls.__qualname__}".lower(), "lightning_ft.ftstrategy"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Data parallel, outlives the death of ranks.")


# `Trainer` accepts a `torch.compile`d module only under strategies that it knows.
DDPStrategy.register(FTStrategy)
