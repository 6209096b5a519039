"""FTStrategy: Lightning's Strategy contract on an elastic engine, a few lines a method."""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH, ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_ft.data.loader import ElasticLoader
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Change, Engine, SoloEngine
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.options import Policy, SupervisionOptions
from lightning_ft.elastic.process_group import install_once
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.events.log import EventLog
from lightning_ft.strategies import joining, leadership
from lightning_ft.strategies.buffers import BufferSync
from lightning_ft.strategies.epoch_length import set_length, set_length_while_fetching
from lightning_ft.strategies.evaluation import EvaluationShards
from lightning_ft.strategies.files import write_atomically
from lightning_ft.strategies.ghost import ghost_step
from lightning_ft.strategies.launcher import ElasticLauncher
from lightning_ft.strategies.reduction import GradientReducer
from lightning_ft.strategies.startup import StartupRecord

log = logging.getLogger(__name__)

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_REDUCE_OPS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}


class FTStrategy(ParallelStrategy):
    """Data-parallel training that outlives the death of any rank.

    When a rank dies, the survivors leave its gradient out of the average of that very step and go on; the rank is started
    again, receives the state of a live one and joins at a batch boundary. A LightningModule that trains under ``ddp``
    trains under this strategy unchanged, and what it computes without faults is the same.

    Args:
        max_restarts: How often a rank's slot is started again within ``SupervisionOptions.restart_window``;
            0: a rank that dies stays away.
        min_replicas: With fewer live ranks than this, training waits for respawns after the step under way.
        timeout: How long ranks may wait for each other; seconds if a number. A rank that keeps the others waiting longer
            is taken for hung and excluded. Default: 30 minutes.
        supervision: The rarer options of the supervisor.

    Raises:
        ValueError: If an argument is out of range.

    Example::

        trainer = Trainer(devices=4, strategy=FTStrategy())

    """

    is_distributed = True
    strategy_name = "ft"

    def __init__(
        self,
        *,
        max_restarts: int = 3,
        min_replicas: int = 1,
        timeout: timedelta | float | None = None,
        supervision: SupervisionOptions | None = None,
    ) -> None:
        super().__init__()
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._policy = Policy.of(
            supervision or SupervisionOptions(), max_restarts=max_restarts, min_replicas=min_replicas, timeout=seconds
        )
        self._timeout = _DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
        self.num_nodes = 1
        self.engine: Engine = SoloEngine()
        self.collectives = Collectives(self.engine)
        self.events = EventLog(slot=0, incarnation=0)
        self.event_directory: Path | None = None
        self._startup = StartupRecord(self.engine)
        self._shards = EvaluationShards()
        self._trainer: Trainer | None = None
        self._reducer: GradientReducer | None = None
        self._buffers: BufferSync | None = None
        self._loader: ElasticLoader | None = None
        self._resources = ExitStack()
        self._batch = ExitStack()
        self._synchronize_gradients = True
        self._micro_batches: list[bool] = []
        self._reduced: dict[str, Any] = {}
        self._join_agreed = False
        self._received_state: dict[str, Any] | None = None
        self._logger_versions: list[Any] = []
        self._asked_to_stop = False

    # Ranks.

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        environment = RankEnvironment.from_environ(os.environ)
        return self.parallel_devices[0 if environment is None else environment.slot]

    @property
    def num_processes(self) -> int:
        """Number of slots on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    @override
    def global_rank(self) -> int:
        environment = RankEnvironment.from_environ(os.environ)
        if isinstance(self.engine, SoloEngine):
            return 0 if environment is None or environment.incarnation == 0 and environment.slot == 0 else 1
        return self.engine.rank

    @property
    @override
    def local_rank(self) -> int:
        return self.global_rank  # one machine; the device follows the slot, not the rank

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return len(self.engine.members) if self.engine.members and not self.engine.alone else self.num_processes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": min(self.global_rank, self.world_size - 1)}

    @property
    def members(self) -> tuple[int, ...]:
        """Slots of the live ranks, by rank."""
        return self.engine.members

    def exclude(self, slot: int, reason: str) -> None:
        """Remove a live rank that is not to be trusted; its slot is started again as after a death.

        Args:
            slot: The slot to remove.
            reason: Why; for the log.

        Raises:
            ValueError: If the slot is not live.

        """
        self.engine.exclude(slot, reason)

    # Start.

    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes != 1:
            raise MisconfigurationException(
                f"`FTStrategy` with `Trainer(num_nodes={self.num_nodes})` is not supported: expected 1."
            )
        if not 1 <= self._policy.min_replicas <= self.num_processes:
            raise MisconfigurationException(
                f"`FTStrategy(min_replicas={self._policy.min_replicas})` with `devices={self.num_processes}`:"
                f" expected 1 to {self.num_processes}."
            )
        self._launcher = ElasticLauncher(self)

    def start_engine(self, environment: RankEnvironment | None) -> Engine:
        """Return the engine of this process, started at its first Trainer call."""
        if environment is not None and isinstance(self.engine, SoloEngine):
            self.engine = engine = LocalEngine.of_process(environment, self._policy, self._timeout)
            self.events = engine.events
            self.collectives = Collectives(engine)
            install_once(engine, self.collectives)
        self._startup = StartupRecord(self.engine)
        self.engine.on_change = self._on_change
        return self.engine

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self._trainer = trainer
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._same_start()
        if fitting:
            self._reducer = GradientReducer(self.model.parameters(), self.engine)
            self._resources.callback(self._reducer.close)
            self._buffers = BufferSync(self.model, self.collectives)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._enter_training_loop(trainer)
        self._open_event_log(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _same_start(self) -> None:
        """Collective. Give all ranks the parameters and buffers of rank 0, as ``ddp`` does."""
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for tensor, value in zip(tensors, self.collectives.broadcast_tensors(tensors, label="module"), strict=True):
            tensor.detach().copy_(value)

    def _open_event_log(self, trainer: Trainer) -> None:
        if isinstance(self.engine, LocalEngine):
            root = Path(trainer.log_dir or trainer.default_root_dir).absolute()
            self.event_directory = root / "lightning_ft" / self.engine.run_id
            self.events.open(self.event_directory)
            self.engine.report_log(str(self.event_directory))

    def _enter_training_loop(self, trainer: Trainer) -> None:
        """Get a word in before every batch, and keep Lightning from synchronizing ranks on its own for each of them."""
        epoch_loop = trainer.fit_loop.epoch_loop
        advance = epoch_loop.advance
        if not hasattr(advance, "__wrapped_by_ft__"):

            def advance_elastically(data_fetcher: Any) -> None:
                self._before_batch()
                with self._batch:  # ends a ghost step, if this becomes one
                    advance(data_fetcher)

            advance_elastically.__wrapped_by_ft__ = True  # type: ignore[attr-defined]
            epoch_loop.advance = advance_elastically  # type: ignore[method-assign]
        epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[method-assign,assignment]

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        self._asked_to_stop = True  # the ranks agree on the last step in the next reduction

    # Data.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer
        if isinstance(self.engine, SoloEngine) or trainer is None:
            return dataloader
        if not trainer.training:
            self._shards.add(dataloader)
            return dataloader
        self._check_train_loader(dataloader)
        assert isinstance(dataloader, DataLoader)
        loader = ElasticLoader(
            dataloader,
            self.engine.slot,
            self.engine.num_slots,
            current_epoch=lambda: trainer.fit_loop.epoch_progress.current.processed,
            agree=self._agree_on_order,
            limit=trainer.limit_train_batches if trainer.limit_train_batches is not None else 1.0,
        )
        loader.live = tuple(sorted(self.engine.members)) if not self.engine.alone else loader.live
        loader.deferred = self.engine.alone
        loader.on_take = lambda: self._on_take(trainer, loader)
        _auto_add_worker_init_fn(loader, self.engine.slot)
        self._loader = loader
        return loader

    def _check_train_loader(self, dataloader: object) -> None:
        if not isinstance(dataloader, DataLoader) or not isinstance(getattr(dataloader, "sampler", None), DistributedSampler):
            kind = type(getattr(dataloader, "dataset", dataloader)).__name__
            raise MisconfigurationException(
                f"`FTStrategy` deals out the samples of a `DataLoader` over a map-style dataset, but got {kind}. Iterable"
                " datasets, other loaders and `Trainer(use_distributed_sampler=False)` without a `DistributedSampler` of"
                " your own are not supported for training."
            )

    def _agree_on_order(self, draw: Callable[[], Tensor]) -> Tensor:
        packed = draw() if self.engine.alone or self.engine.rank == 0 else torch.empty(0, dtype=torch.int64)
        return self.broadcast(packed)

    @override
    def on_train_start(self) -> None:
        assert self._trainer is not None
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1 and not isinstance(self.engine, SoloEngine):
            raise MisconfigurationException(
                f"`FTStrategy` got {len(combined.flattened)} training dataloaders: expected 1. Combine the datasets, for"
                " example with `torch.utils.data.ConcatDataset`."
            )

    # Before every batch.

    def _before_batch(self) -> None:
        """Collective. At a step boundary: enter as a joiner, let joiners in."""
        trainer = self._trainer
        assert trainer is not None
        if self._received_state is not None:
            self._finish_joining(trainer)
        if self._startup.open:
            self._startup.close()
            if not self.engine.alone:
                self._logger_versions = self._logger_versions or self.broadcast(leadership.logger_versions(trainer))
        if (self._join_agreed or self.engine.hold) and not self._micro_batches:
            self._join_agreed = False
            started = time.monotonic()
            joined = self.engine.admit_joiners(lambda slots: self._hand_out(trainer, slots))
            if self._loader is not None and joined:
                self._loader.admit(joined)
                set_length(trainer, self._loader)
            self.events.emit("admitted", joined=joined, ms=round(1e3 * (time.monotonic() - started), 2))
        self._show_replicas(trainer)

    def _show_replicas(self, trainer: Trainer) -> None:
        if not isinstance(self.engine, SoloEngine):
            replicas = f"{len(self.engine.members)}/{self.engine.num_slots}"
            trainer._logger_connector._progress_bar_metrics["replicas"] = replicas  # type: ignore[assignment]

    def _on_take(self, trainer: Trainer, loader: ElasticLoader) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            self.events.emit("epoch", epoch=loader.plan.epoch, num_tickets=loader.plan.num_tickets)
        set_length_while_fetching(trainer, loader)
        if loader.ticket is None:
            assert self.lightning_module is not None
            self._batch.enter_context(ghost_step(trainer, self.lightning_module, self.collectives))

    # Joining.

    def _hand_out(self, trainer: Trainer, slots: Any) -> dict[str, Any]:
        assert self._loader is not None
        return {
            "training": joining.collect_state(trainer),
            "loader": self._loader.state_dict(),
            "live": sorted({*self._loader.live, *slots}),
            "logger_versions": self._logger_versions,
        }

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self.engine.alone and not isinstance(self.engine, SoloEngine)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if str(checkpoint_path) != joining.PEER_CHECKPOINT:
            return super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self._trainer
        assert trainer is not None
        # All that a joiner can do alone comes first: from here on the others wait for it.
        trainer.fit_loop.setup_data()
        if trainer.fit_loop.epoch_loop._should_check_val_epoch():
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        state = self.engine.join()
        assert self._loader is not None
        self._loader.load_handed_out(state["loader"], tuple(state["live"]))
        self._logger_versions = state["logger_versions"]
        self._received_state = state["training"]
        return state["training"]["checkpoint"]  # type: ignore[no-any-return]

    def _finish_joining(self, trainer: Trainer) -> None:
        state, self._received_state = self._received_state, None
        assert state is not None
        self.engine.enter()
        self.set_world_ranks()
        joining.enter_loop(trainer, state)
        if self._loader is not None:
            set_length(trainer, self._loader)
        self.events.emit("joined", step=trainer.global_step, epoch=trainer.current_epoch)

    # Membership changes.

    def _on_change(self, change: Change) -> None:
        self.set_world_ranks()
        trainer = self._trainer
        if trainer is None:
            return
        if not (trainer.validating or trainer.sanity_checking or trainer.evaluating):
            self._shards.follow(trainer, self.global_rank, self.world_size)
        if change.before and change.before[0] != self.engine.slot and change.members[0] == self.engine.slot:
            self.events.emit("leader", before=change.before[0])
            assert self.lightning_module is not None
            leadership.take_over(trainer, self.lightning_module, self._logger_versions)
        self._tell(trainer, change)

    def _tell(self, trainer: Trainer, change: Change) -> None:
        if self.engine.rank != 0:
            return
        alive = f"{len(change.members)} of {self.engine.num_slots} replicas"
        for slot, how in change.dead:
            log.warning("Slot %s died (%s) at step %s; %s go on.", slot, how, trainer.global_step, alive)
        joined = sorted(set(change.members) - set(change.before))
        if change.reason == "join" and joined:
            log.info("Slots %s are back at step %s; %s.", joined, trainer.global_step, alive)

    def set_world_ranks(self) -> None:
        """Have everything that asks for the rank see the live one."""
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank

    # Steps.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._before_forward()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._before_forward()
        return super().validation_step(*args, **kwargs)

    def _before_forward(self) -> None:
        if self._buffers is not None:
            self._buffers.before_forward(synchronize_gradients=self._synchronize_gradients)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._synchronize_gradients = False
        try:
            yield
        finally:
            self._synchronize_gradients = True

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        counts = self._loader is None or self._loader.ticket is not None
        self._micro_batches.append(counts)
        if self._synchronize_gradients and self._reducer is not None:
            self._reducer.arm(sum(self._micro_batches), len(self._micro_batches), stop=self._asked_to_stop)
        self.precision_plugin.backward(closure_loss if counts else closure_loss * 0.0, module, optimizer, *args, **kwargs)
        if self._synchronize_gradients and self._reducer is not None:
            self._finish_reduction(self._reducer)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _finish_reduction(self, reducer: GradientReducer) -> None:
        assert self._trainer is not None
        reduced = reducer.finish()
        self._micro_batches.clear()
        self._join_agreed = self._join_agreed or reduced.join
        if reduced.stop:
            self._trainer._signal_connector.received_sigterm = True
        if self._loader is not None:
            done = self._loader.commit(reduced.members)
            set_length(self._trainer, self._loader)
            self._reduced = {"epoch": self._loader.plan.epoch, "tickets": done, "members": list(reduced.members)}

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._trainer is not None:
            step = self._trainer.global_step + 1
            self.events.emit("step", step=step, **self._reduced)
            self.engine.report_progress(step)
        return output

    # Collectives.

    @override
    def barrier(self, name: str | None = None) -> None:
        """Collective. Return once every live rank is in this barrier."""
        self.collectives.barrier(name or "strategy")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Collective. Return the object of rank ``src``; a joiner gets what was sent when the job started."""
        return self._startup.recall(obj, lambda: self.collectives.broadcast_object(obj, src))

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Collective. Reduce ``tensor`` over the live ranks; for a mean, over those that have a batch of their own."""
        if not isinstance(tensor, Tensor):
            return tensor
        if isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            result = self.collectives.mean(tensor)
            return tensor.copy_(result) if tensor.is_floating_point() else result
        op = _REDUCE_OPS[reduce_op.lower()] if isinstance(reduce_op, str) else reduce_op or ReduceOp.SUM
        return tensor.copy_(self.collectives.reduce(tensor, op))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Collective. Whether all live ranks, or any of them, say yes."""
        yes, total = self.collectives.count(bool(decision))
        return yes == total if all else yes > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Collective. Return the tensors of the live ranks, stacked by rank."""
        if sync_grads:
            raise NotImplementedError("`all_gather(sync_grads=True)` is not supported by `FTStrategy`.")
        return torch.stack(self.collectives.all_gather(tensor))

    # Checkpoints.

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Collective. Rank 0 writes, whole or not at all; if it dies in it, the next rank 0 writes."""
        written = False
        while not written:
            if self.is_global_zero:
                write_atomically(self.checkpoint_io, checkpoint, filepath, storage_options)
            written = self.collectives.count(self.is_global_zero)[0] > 0

    # End.

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.events.emit("exception", type=type(exception).__name__, message=str(exception)[:500])

    @override
    def teardown(self) -> None:
        self._resources.close()
        self._reducer = self._buffers = None
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name in (cls.strategy_name, f"{cls.__module__}.{cls.__qualname__}".lower(), "lightning_ft.ftstrategy"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="Data parallel, outlives the death of ranks.")


# `Trainer` accepts a `torch.compile`d module only under strategies that it knows.
DDPStrategy.register(FTStrategy)
