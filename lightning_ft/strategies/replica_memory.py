"""What lets the only replica of a sharded module survive its ranks: snapshots in memory, and the way back to one."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.events.log import EventLog
from lightning_ft.sharding._fsdp_compat import missing_names
from lightning_ft.sharding.mesh import renewed_mesh, shard_mesh
from lightning_ft.sharding.reshard import collect, move, restore
from lightning_ft.sharding.shard_tree import put_together
from lightning_ft.sharding.shared_slots import Label, Moment
from lightning_ft.sharding.snapshots import Found, Snapshots, find_whole
from lightning_ft.strategies import changing_modules, own_results, source_states, tuning
from lightning_ft.strategies.begun_anew import what_is_left_by
from lightning_ft.strategies.sharding import averaged_copies
from lightning_ft.supervision.host_memory import paths_of

log = logging.getLogger(__name__)


class ReplicaMemory:
    """Snapshots of one Trainer call, taken by all ranks together.

    Args:
        trainer: The trainer.
        engine: Knows the replica.
        collectives: Of the live ranks.
        events: Where snapshots and ways back are recorded.
        paths: Where the slots' memory is, by slot.
        every_n_steps: How many optimizer steps lie between two snapshots.
        on_move: Called when shards have other sizes.

    """

    def __init__(
        self,
        trainer: Trainer,
        engine: LocalEngine,
        collectives: Collectives,
        events: EventLog,
        *,
        paths: Sequence[Sequence[str]],
        every_n_steps: int,
        on_move: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._collectives = collectives
        self._events = events
        self._paths = paths
        self._every_n_steps = every_n_steps
        self._copies = list(averaged_copies(trainer))
        self._on_move = on_move
        self._snapshots = Snapshots(paths[engine.slot])
        self._moves_in_place = not missing_names()
        self._last_step: int | None = None
        self._is_new = False  # it joined, and the supervisor does not know yet that this is over

    @classmethod
    def of_process(cls, trainer: Trainer, engine: LocalEngine, *args: Any, **kwargs: Any) -> "ReplicaMemory | None":
        """Return the memory of this rank; None if its supervisor has none, or it has no supervisor."""
        environment = RankEnvironment.of_process()
        paths = [] if environment is None else paths_of(environment.memory)
        if not paths:
            log.warning("There is no memory for snapshots: after a death all ranks begin again from the newest checkpoint.")
            return None
        if missing := missing_names():
            rank_zero_warn(
                f"torch {torch.__version__} lacks {', '.join(missing)}: shards can't be moved in place. After a death, and"
                " when a rank returns, all ranks begin again from the newest snapshot, which takes seconds."
            )
        return cls(trainer, engine, *args, paths=paths, **kwargs)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While this is entered, and once there is a snapshot, ranks that lost their replica go back to it."""
        try:
            yield
        finally:
            self._snapshots.fence()
            self._engine.may_regroup = False
            self._engine.outlives_replica = True  # what is left to do is to end the call

    # Snapshots.

    def at_boundary(self, hand_out: Callable[[], dict[str, Any]]) -> None:
        """Collective. Between two optimizer steps: take a snapshot if one is due."""
        step = self._trainer.global_step
        if self._last_step is None or (step != self._last_step and step % self._every_n_steps == 0):
            self._take(hand_out, at_once=self._last_step is None)
        self._engine.may_regroup = True
        if self._is_new:
            self._is_new = False
            self._engine.report_progress(step)  # it holds the state: the supervisor can count on it before its first step

    def leave_module(self) -> None:
        """Collective. When the fit is over: put the module where those find it who begin a later call again."""
        if not tuning.is_searching(self._trainer):
            self._put(collect(self._trainer.lightning_module, []), what_is_left_by(self._engine.call), at_once=True)

    def poll(self) -> None:
        """Take note of a snapshot that was copied meanwhile."""
        self._snapshots.poll()

    def fence(self) -> None:
        """Return once what optimizers are about to change was copied."""
        self._snapshots.fence()

    def _take(self, hand_out: Callable[[], dict[str, Any]], *, at_once: bool) -> Moment:
        shards = [collect(copy, []) for copy in self._copies]
        shards.append(collect(self._trainer.lightning_module, self._trainer.optimizers))
        state = {"shards": shards, "own_results": own_results.describe(self._trainer), **hand_out()}
        moment = self._put(state, self._engine.call, at_once=at_once)
        self._last_step = moment.step
        return moment

    def _put(self, state: dict[str, Any], call: int, *, at_once: bool) -> Moment:
        self._snapshots.fence()
        moment = Moment(self._engine.generation, self._trainer.global_step, self._engine.completed)
        replica = self._engine.replica
        yes, total = self._collectives.count(self._snapshots.is_latest_whole)
        self._snapshots.begin(
            Label(moment, replica.shard, replica.size, call),
            state,
            deferred=list(self._slow_tensors()),
            latest_is_whole=yes == total,
            at_once=at_once,
        )
        return moment

    def _slow_tensors(self) -> Iterator[Tensor]:
        """What only optimizers change, and what is most of the state."""
        yield from self._trainer.lightning_module.parameters()
        for optimizer in self._trainer.optimizers:
            for values in optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor) and value.dim())

    # Ranks that come.

    def prepare_admission(self, hand_out: Callable[[], dict[str, Any]]) -> Moment | None:
        """Collective. Put the state as it is now where joiners find it; None if there is no room for it."""
        moment = self._take(hand_out, at_once=True)
        yes, total = self._collectives.count(self._snapshots.is_latest_whole)
        if yes < total:
            log.warning("No rank can join: there is no memory in which it would find the state.")
            return None
        self._snapshots.keep(moment)
        if not self._moves_in_place:
            self._engine.retire()  # the joiner, too, finds the state when all begin again
        return moment

    def grow(self, moment: Moment) -> None:
        """Divide the state anew after others joined."""
        self.restore(self._read(self._find(moment)))
        self._snapshots.keep(moment)

    def receive(self, told: Sequence[int]) -> dict[str, Any]:
        """As a joiner: return the state that the others put down at the moment which they told."""
        moment = Moment(*told)
        state = self._read(self._find(moment))
        self._adopt(moment, state)
        return state

    def take_over(self) -> dict[str, Any]:
        """As one of the ranks that begin the call again: return the newest whole state of those that are gone."""
        found = self._whole()[0]
        lost = max(0, self._engine.reached - found.moment.step)
        own = found.index_of(self._paths[self._engine.slot])
        mesh = shard_mesh(self._engine.shard_group, self._trainer.strategy.root_device.type)
        state = _state_of(found.read(), own or 0, mesh)
        if own is None:
            state["own_results"] = {}
        self._adopt(found.moment, state)
        self._tell("All ranks were started again and", found.moment.step, state["batch"], lost)
        return state

    def _adopt(self, moment: Moment, state: dict[str, Any]) -> None:
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        changing_modules.adopt_groups(module, optimizers, state["training"]["groups"])
        self.restore(state)
        self._snapshots.keep(moment)
        self._last_step = moment.step
        self._engine.may_regroup = self._is_new = True

    # Ranks that go.

    def go_back(self) -> dict[str, Any]:
        """Collective. After ReplicaLost: bring the ranks that are left together and return the newest whole state.

        The module and its optimizers are sharded over them already; what they hold, :meth:`restore` gives them. If there is
        no whole state, all ranks are started again.
        """
        started, reached = time.monotonic(), self._trainer.global_step
        self._snapshots.fence()
        if not self._moves_in_place:
            self._engine.retire()
        self._engine.regroup()
        whole = self._whole()
        newest: list[int] = self._collectives.broadcast_object([*whole[0].moment] if whole else [])
        if not newest:
            self._engine.retire()
        moment = Moment(*newest)
        state = self._read(self._find(moment))
        self._snapshots.keep(moment)
        self._last_step = moment.step
        spent = round(1e3 * (time.monotonic() - started), 2)
        self._tell(f"{len(self._engine.members)} ranks", moment.step, state["batch"], reached - moment.step, ms=spent)
        return state

    def _tell(self, who: str, step: int, batch: int, lost: int, **more: float) -> None:
        self._events.emit("rewound", step=step, batch=batch, lost=lost, **more)
        if self._engine.rank == 0:
            log.warning("%s go on from the snapshot of step %d; %d steps are trained again.", who, step, lost)

    def _whole(self) -> list[Found]:
        """Return all whole snapshots of this call, the newest first."""
        return find_whole((path for own in self._paths for path in own), self._engine.call)

    def _find(self, moment: Moment) -> Found:
        return next(found for found in self._whole() if found.moment == moment)

    def _read(self, found: Found) -> dict[str, Any]:
        mesh = renewed_mesh(self._engine.shard_group, self._trainer.strategy.root_device.type)
        own = found.index_of(self._paths[self._engine.slot])
        state = _state_of(found.read(), own or 0, mesh)
        for copy in self._copies:
            move(copy, [], mesh)
        move(self._trainer.lightning_module, self._trainer.optimizers, mesh)
        self._on_move()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Give the module, its copies and optimizers what they held."""
        # Apart from Lightning's checkpoint, from which hooks may take out or change what they like.
        *copies, module = state["shards"]
        for copy, own in zip(self._copies, copies, strict=True):
            restore(copy, [], own)
        restore(self._trainer.lightning_module, self._trainer.optimizers, module)


def _state_of(parts: Sequence[Any], base: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the state that ranks took apart; where streams are, each rank knows of its own."""
    state: dict[str, Any] = put_together(parts, base, mesh)
    return {**state, "sources": source_states.unpack(part["sources"] for part in parts)}
