"""The event log of a Trainer under any strategy, and what of it checkpoints refer to."""

import logging
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer

from lightning_ft.checkpoint.store_path import is_store, place
from lightning_ft.events.log import EventLog
from lightning_ft.trainer.saving_peers import agree_on_run_id

log = logging.getLogger(__name__)

REFERENCE = "lightning_ft"
"""Under this key checkpoints say which run made them, where its events are, and how many attempts came before it."""

_logs: WeakKeyDictionary[Trainer, EventLog] = WeakKeyDictionary()


def event_log_of(trainer: Trainer) -> EventLog:
    """Collective. Return the event log of this rank; for the ``setup`` of callbacks.

    That of FTStrategy, or one that is made with the first call: ``<log_dir>/ft_events/<run id>``.
    """
    strategy: Any = trainer.strategy
    events = getattr(strategy, "events", None)
    if isinstance(events, EventLog) and hasattr(strategy.engine, "run_id"):
        return events  # the strategy opens it
    if trainer not in _logs:
        events = events if isinstance(events, EventLog) else EventLog(slot=trainer.global_rank)
        directory = event_directory(trainer, agree_on_run_id(trainer))
        events.open(directory)
        events.emit("run", run_id=directory.name, num_slots=trainer.world_size, pid=os.getpid())
        _logs[trainer] = events
    return _logs[trainer]


def event_directory(trainer: Trainer, run_id: str) -> Path:
    """Collective. Return where the events of a run are."""
    where = trainer.log_dir or trainer.default_root_dir
    return Path(os.curdir if is_store(where) else where).absolute() / "ft_events" / run_id


def refer(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Write into ``checkpoint`` where the events of the run are that made it."""
    strategy: Any = trainer.strategy
    directory: Path | None = getattr(strategy, "event_directory", None)
    if directory is not None:
        attempt = int(getattr(strategy, "attempt", 0))
        checkpoint[REFERENCE] = {"run_id": directory.name, "events": str(directory), "attempt": attempt}


def tell_resumed(events: EventLog, path: _PATH, reference: dict[str, Any], step: int) -> int:
    """Record that a training goes on from a checkpoint with this reference; return how many attempts came before it."""
    attempt = int(reference.get("attempt", 0)) + 1
    known = {name: reference[name] for name in ("run_id", "events") if name in reference}
    events.emit("resumed", path=str(place(path)), step=step, attempt=attempt, **known)
    return attempt
