"""Where a Trainer call goes on that all ranks begin again, since nobody was left who held its state."""

import json
import logging
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule, Trainer
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from lightning_ft.checkpoint.store_path import place
from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.errors import ReplicaLostError
from lightning_ft.events.log import EventLog
from lightning_ft.sharding.reshard import restore
from lightning_ft.sharding.shard_tree import put_together, put_together_whole
from lightning_ft.sharding.snapshots import Found, find_whole
from lightning_ft.strategies import leadership, past_calls
from lightning_ft.strategies.joining import PEER_CHECKPOINT
from lightning_ft.supervision.host_memory import paths_of

log = logging.getLogger(__name__)

_watched: WeakSet[LocalEngine] = WeakSet()


class BegunAnew:
    """A Trainer call that was under way in processes that are gone.

    Args:
        engine: Of this process.
        fn: What was called.
        asked: The ``ckpt_path`` that the user's script gives to a fit.

    Raises:
        ReplicaLostError: If it can't be gone on with: those processes had trained the module in a call before it.

    """

    def __init__(self, engine: LocalEngine, fn: str, asked: Any) -> None:
        self._engine = engine
        self._reached = engine.reached
        # Nobody writes there before all have come to the first batch: each rank finds the same.
        self.from_memory = fn == "fit" and bool(_snapshots(engine.call))
        """Whether there is a snapshot of it in memory."""
        saved = newest_checkpoint(engine) if fn == "fit" and not self.from_memory else None
        self.ckpt_path = PEER_CHECKPOINT if self.from_memory else saved or asked
        """What is to be loaded."""
        self._left: Found | None = None
        if not self.from_memory and saved is None and past_calls.have_fitted(engine):
            found = [_snapshots(what_is_left_by(call))[:1] for call in reversed(range(engine.call))]
            self._left = next((snapshot for own in found for snapshot in own), None)
            if self._left is None:
                raise ReplicaLostError(len(engine.members), engine.num_slots)

    def give_back(self, module: Module, mesh: DeviceMesh | None) -> None:
        """Give the module of this call what a fit before it had made of it.

        Raises:
            ReplicaLostError: If that fit was one of another module.

        """
        if self._left is None:
            return
        parts = self._left.read()
        state = put_together_whole(parts) if mesh is None else put_together(parts, 0, mesh)
        if {n: v.shape for n, v in state["module"].items()} != {n: v.shape for n, v in module.state_dict().items()}:
            raise ReplicaLostError(len(self._engine.members), self._engine.num_slots)
        restore(module, [], state)

    def continue_loggers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have loggers go on with the version that the processes before wrote to; before they make a new one."""
        value = self._engine.recorded(_key(self._engine, "loggers"))
        if value is not None:
            leadership.go_on(trainer, pl_module, json.loads(value), is_leader=self._engine.rank == 0)

    def tell(self, events: EventLog, resumed: tuple[Any, int] | None, *, is_leader: bool) -> None:
        """Record that the fit goes on from a checkpoint and its step, or from the beginning."""
        path, step = resumed or (None, 0)
        lost = max(0, self._reached - step)
        if resumed is None:
            events.emit("rewound", step=0, batch=0, lost=lost)
        if is_leader:
            where = "from the beginning" if resumed is None else f"from {path}, of step {step}"
            log.warning("All ranks were started again and go on %s; %d steps are trained again.", where, lost)


def what_is_left_by(call: int) -> int:
    """Return by which number of a Trainer call the snapshot of the module is known that a fit left."""
    return -1 - call


def _snapshots(call: int) -> list[Found]:
    environment = RankEnvironment.of_process()
    own = [] if environment is None else paths_of(environment.memory)
    return find_whole((path for paths in own for path in paths), call)


def remember_loggers(engine: Engine, trainer: Trainer) -> None:
    """On rank 0: have those who begin the call anew find to which version each logger writes."""
    versions = leadership.logger_versions(trainer)
    engine.record(_key(engine, "loggers"), json.dumps([v if isinstance(v, int | str) else None for v in versions]).encode())


def remember_checkpoints(engine: LocalEngine) -> None:
    """Have those who begin a call anew find the checkpoints of which this process records that they are there.

    May be called again.
    """
    if engine in _watched:
        return
    _watched.add(engine)

    def note(event: str, record: dict[str, Any]) -> None:
        if event not in ("checkpoint", "checkpoint_removed"):
            return
        gone = {record["path"], *record.get("replaces", ())}
        entries = [entry for entry in _saved(engine, engine.slot) if entry[1] not in gone]
        if event == "checkpoint" and not record.get("weights_only"):
            entries.append((record["step"], record["path"]))
        engine.record(_key(engine, engine.slot), json.dumps(entries).encode())

    engine.events.subscribe(note)


def newest_checkpoint(engine: LocalEngine) -> str | None:
    """Return the newest checkpoint of this call that is still there."""
    entries = {entry for slot in range(engine.num_slots) for entry in _saved(engine, slot)}
    return next((path for _, path in sorted(entries, reverse=True) if place(path).exists()), None)


def _saved(engine: LocalEngine, slot: int) -> list[tuple[int, str]]:
    value = engine.recorded(_key(engine, slot))
    return [] if value is None else [(step, path) for step, path in json.loads(value)]


def _key(engine: Engine, what: int | str) -> str:
    return f"begun/{engine.call}/{what}"
