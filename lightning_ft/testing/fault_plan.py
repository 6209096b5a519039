"""The callback that makes the faults of a plan happen at their points of a training."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.autograd import Variable
from typing_extensions import override

from lightning_ft.elastic.checks import check_seconds
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.testing.faults import EVENT_POINTS, Fault, Ledger

ENVIRONMENT_VARIABLE = "LIGHTNING_FT_FAULT_PLAN"


class FaultPlan(Callback):
    """Faults that are to happen in a training, each of them once.

    Before a fault fires it is recorded durably: in a file of ``directory`` and, under FTStrategy, as event ``fault``. A
    test is only worth something if its plan was used up: see :func:`~lightning_ft.testing.assertions.assert_used_up`.

    Args:
        faults: The faults, or their fields as dictionaries.
        directory: Where firing is recorded: shared by all ranks, and used by one run only. Default: a new one for each
            run of FTStrategy, under the trainer's ``default_root_dir``.
        timeout: Seconds that a rank waits at a rendezvous.

    Example::

        plan = FaultPlan([Fault(kind="kill", slot=1, point="gradients_ready", step=10)])
        Trainer(devices=4, strategy=FTStrategy(), callbacks=[plan])

    """

    def __init__(
        self,
        faults: Sequence[Fault | Mapping[str, Any]] = (),
        *,
        directory: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.faults = tuple(fault if isinstance(fault, Fault) else Fault(**fault) for fault in faults)
        check_seconds("FaultPlan", "timeout", timeout)
        self.directory = directory
        self.timeout = timeout
        self._ledger: Ledger | None = None
        self._visits = dict.fromkeys(range(len(self.faults)), 0)
        self._events: Any = None
        self._undo: list[Callable[[], None]] = []

    # As plain data.

    def to_json(self) -> str:
        """Return the plan as text, for :meth:`from_json`."""
        faults = [asdict(fault) for fault in self.faults]
        return json.dumps({"faults": faults, "directory": self.directory, "timeout": self.timeout})

    @classmethod
    def from_json(cls, text: str) -> "FaultPlan":
        """Return the plan that :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    @classmethod
    def from_environ(cls) -> "FaultPlan":
        """Return the plan that :func:`~lightning_ft.testing.run_job` was given; an empty one outside of it."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls() if text is None else cls.from_json(text)

    def has_fired(self, index: int) -> bool:
        """Return whether the fault at ``index`` is on record in ``directory``."""
        return self.directory is not None and Ledger(self.directory, self.timeout).has_fired(index)

    # Points that are hooks.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self.faults:
            return
        events = getattr(trainer.strategy, "events", None)
        if events is not None and events is not self._events:
            events.subscribe(partial(self._on_event, trainer))
            self._events = events
        self._reach("setup", trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("fit_start", trainer)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("sanity_check", trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.faults:
            self._watch_forward(trainer, pl_module)
            self._watch_backward(trainer, pl_module)
            self._watch_saving(trainer)
        self._reach("train_start", trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("train_epoch_start", trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._reach("train_batch_start", trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._reach("before_optimizer_step", trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._reach("train_batch_end", trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._reach("validation_start", trainer)

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.sanity_checking:
            self._reach("validation_batch", trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._reach("validation_end", trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reach("save_checkpoint", trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("train_epoch_end", trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("train_end", trainer)

    @override
    def on_test_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._reach("test_batch", trainer)

    @override
    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._reach("predict_batch", trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        while self._undo:
            self._undo.pop()()

    # Points that no hook of Lightning is at.

    def _watch_forward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training_step = pl_module.training_step

        @wraps(training_step)
        def reach_forward(*args: Any, **kwargs: Any) -> Any:
            self._reach("forward", trainer)
            return training_step(*args, **kwargs)

        pl_module.training_step = reach_forward  # type: ignore[method-assign]
        self._undo.append(lambda: vars(pl_module).pop("training_step", None))

    def _watch_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_first = True

        def finish() -> None:
            nonlocal is_first
            is_first = True
            self._reach("gradients_ready", trainer)

        def on_gradient(parameter: Any) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                Variable._execution_engine.queue_callback(finish)  # called when the backward pass is through
                self._reach("backward_early", trainer)

        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                self._undo.append(parameter.register_post_accumulate_grad_hook(on_gradient).remove)

    def _watch_saving(self, trainer: Trainer) -> None:
        inner = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = _WatchedIO(inner, lambda: self._reach("during_save", trainer))
        self._undo.append(lambda: setattr(trainer.strategy, "checkpoint_io", inner))

    def _on_event(self, trainer: Trainer, event: str, record: dict[str, Any]) -> None:
        if event in EVENT_POINTS:
            self._reach(event, trainer)

    # Firing.

    def _reach(self, point: str, trainer: Trainer) -> None:
        due = [(index, fault) for index, fault in enumerate(self.faults) if self._is_due(index, fault, point, trainer)]
        for index, fault in due:  # for all of them first: ranks that die at the same place die at the same time
            if fault.rendezvous:
                self._ledger_of(trainer).arrive(index, self._slot(trainer))
        for index, fault in sorted(due, key=lambda item: not self._is_target(item[1], trainer)):
            if self._is_target(fault, trainer):
                self._fire(index, fault, trainer)
            else:
                self._ledger_of(trainer).wait_until_fired(index)

    def _is_due(self, index: int, fault: Fault, point: str, trainer: Trainer) -> bool:
        if fault.point != point or (fault.step is not None and trainer.global_step < fault.step):
            return False
        if not (fault.rendezvous or self._is_target(fault, trainer)):
            return False
        self._visits[index] += 1
        return self._visits[index] == fault.occurrence + 1 and not self._ledger_of(trainer).has_fired(index)

    def _fire(self, index: int, fault: Fault, trainer: Trainer) -> None:
        ledger = self._ledger_of(trainer)
        if fault.rendezvous:
            ledger.wait_for_others(index, getattr(trainer.strategy, "members", range(trainer.world_size)))
        if ledger.mark_fired(index):
            if self._events is not None:
                self._events.emit("fault", index=index, kind=fault.kind, point=fault.point, step=trainer.global_step)
            fault.strike()

    def _is_target(self, fault: Fault, trainer: Trainer) -> bool:
        incarnation = 0 if self._environment is None else self._environment.incarnation
        return self._slot(trainer) == fault.slot and fault.incarnation in (None, incarnation)

    @property
    def _environment(self) -> RankEnvironment | None:
        return RankEnvironment.of_process()  # anew: a spare gets its slot after this callback was made

    def _slot(self, trainer: Trainer) -> int:
        return trainer.global_rank if self._environment is None else self._environment.slot

    def _ledger_of(self, trainer: Trainer) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self.directory or self._default_directory(trainer), self.timeout)
        return self._ledger

    def _default_directory(self, trainer: Trainer) -> Path:
        run = "run" if self._environment is None else self._environment.run_id
        return Path(trainer.default_root_dir) / "fault_plans" / run


class _WatchedIO(CheckpointIO):
    """Tells when a checkpoint's file was written."""

    def __init__(self, inner: CheckpointIO, on_written: Callable[[], None]) -> None:
        self._inner = inner
        self._on_written = on_written

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self._inner.save_checkpoint(checkpoint, path, storage_options)
        self._on_written()

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._inner.load_checkpoint(*args, **kwargs)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self._inner.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        self._inner.teardown()
