"""A callback that dumps what an unmodified module computes, rollout after rollout."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_ft.callbacks.watched_steps import WatchedSteps
from lightning_ft.dump.index import Moment
from lightning_ft.dump.layout import check_name
from lightning_ft.dump.options import PHASES, options_of
from lightning_ft.dump.phase import PhaseDump
from lightning_ft.dump.runs import Run
from lightning_ft.dump.selection import without_match
from lightning_ft.elastic.checks import check_count

log = logging.getLogger(__name__)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PROCESS = secrets.token_hex(8)


class TensorDump(Callback):
    """Dumps inputs, outputs and gradients of submodules, batches, losses, parameters, their gradients and optimizer state.

    The module stays as it is; ``dump("name", tensor)`` of ``lightning_ft.dump`` adds values from within its code. What is
    dumped of a rollout lies in ``<dirpath>/<role>/<phase>/rollout_<id>/attempt_<n>/``, and counts once it is whole. Batches
    and activations are dumped in every step, parameters, gradients (averaged over the ranks) and optimizer state in the
    first one of a rollout. Only the first replica writes, so batches, losses and activations are those of its own batches;
    of a step in which it has none there is an empty tensor ``no_batch:``, which ``lightning-ft dump ls`` tells. When it
    dies, the next one begins another attempt. Dumps of an earlier run are removed when a training begins anew.

    Args:
        dirpath: Where dumps lie: a directory of a file system.
        role: Keeps apart the dumps of several models, such as ``"actor"`` and ``"critic"``.
        rollout_id: A function that returns the id of the current rollout from the trainer; or how many optimizer steps
            are a rollout. Default: ``pl_module.rollout_id`` if there is such a thing, else the epoch.
        config: What is dumped, as a mapping or an OmegaConf config: the options of
            :class:`~lightning_ft.dump.options.PhaseOptions`, and under ``train``, ``validate``, ``test`` and ``predict``
            those of a phase. Default: everything.

    Raises:
        ValueError: If an argument is not valid.
        MisconfigurationException: If the strategy keeps parameters in a form that can't be dumped.

    Example::

        config = {"filter": ["output:*@Linear", "grad_output:*@Linear", "loss:"], "validate": {"enable": False}}
        Trainer(callbacks=[TensorDump("dumps", config=config)])

    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        role: str = "model",
        rollout_id: Callable[[Trainer], int] | int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_name("TensorDump", "role", role)
        if rollout_id is not None and not callable(rollout_id):
            check_count("TensorDump", "rollout_id", rollout_id, least=1)
        if not isinstance(dirpath, (str, os.PathLike)) or not str(dirpath) or "://" in str(dirpath):
            raise ValueError(f"`TensorDump({dirpath!r})` is not valid: expected the path of a directory of a file system.")
        self.dirpath = Path(dirpath).absolute()
        self.role = role
        self.rollout_id = rollout_id
        self._options = {phase: options_of(config, phase) for phase in PHASES}
        self._phases: dict[str, PhaseDump] = {}
        self._current: PhaseDump | None = None
        self._run: Run | None = None
        self._is_fresh = False
        self._is_sharded = False
        self._members: tuple[int, ...] = ()
        self._agreed: dict[str, tuple[Any, Moment]] = {}
        self._steps: WatchedSteps | None = None
        self.peak_bytes = 0
        """The most bytes of copies that waited at once to be written, in one phase of the calls so far."""

    def wait(self) -> None:
        """Return once everything is written that was dumped so far."""
        for dump in self._phases.values():
            dump.wait()

    # Hooks: the training.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._check(trainer)
        engine: Any = getattr(trainer.strategy, "engine", None)
        if any(options.enable for options in self._options.values()):
            self._run = Run(self.dirpath / self.role, getattr(engine, "run_id", "") or _PROCESS)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prepare(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        in_step = batch_idx % trainer.accumulate_grad_batches if pl_module.automatic_optimization else batch_idx
        moment = Moment(trainer.global_step, in_step)
        dump = self._begin_batch(trainer, pl_module, "train", moment)
        if dump is not None:
            dump.dump_state(pl_module, moment)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        dump = self._current
        if dump is not None and dump.phase == "train" and self._is_replica(trainer):
            dump.dump_gradients(pl_module, trainer.optimizers, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        dump = self._end_batch()
        if dump is not None and dump.rollout != self._rollout(trainer):
            dump.close(commit=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._goes_by_epoch(pl_module):
            self._close("train", commit=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close("train", commit=True)

    # Hooks: the other phases.

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_pass(trainer, pl_module, "validate")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_pass(trainer, pl_module, "test")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_pass(trainer, pl_module, "predict")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_evaluation_batch(trainer, "validate", batch_idx, dataloader_idx)

    @override
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_evaluation_batch(trainer, "test", batch_idx, dataloader_idx)

    @override
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_evaluation_batch(trainer, "predict", batch_idx, dataloader_idx)

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_batch()

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_batch()

    @override
    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_batch()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_pass(trainer, "validate")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_pass(trainer, "test")

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_pass(trainer, "predict")

    # Hooks: the end.

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    # Rollouts and attempts.

    def _rollout(self, trainer: Trainer) -> int:
        """Return the id of the current rollout."""
        given, module = self.rollout_id, trainer.lightning_module
        if isinstance(given, int):
            return int(trainer.global_step) // given
        value = given(trainer) if given is not None else getattr(module, "rollout_id", None)
        if value is None:
            return int(trainer.current_epoch)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            source = "pl_module.rollout_id" if given is None else "TensorDump(rollout_id=...)"
            raise ValueError(f"`{source}` is {value!r}: expected an integer, 0 or more.")
        return value

    def _goes_by_epoch(self, pl_module: LightningModule) -> bool:
        return self.rollout_id is None and getattr(pl_module, "rollout_id", None) is None

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once in a Trainer call, when it is known what was loaded."""
        if self._run is None or self._phases:
            return
        incarnation = getattr(getattr(trainer.strategy, "engine", None), "incarnation", 0)
        self._is_fresh = incarnation == 0 and not (trainer.global_step and trainer.ckpt_path)
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
        for phase, options in self._options.items():
            if options.enable:
                self._phases[phase] = PhaseDump(self.dirpath, role=self.role, phase=phase, run=self._run, options=options)
        if trainer.is_global_zero:
            self._tell_what_matches_nothing(pl_module)
        self._steps = WatchedSteps(pl_module, _STEPS, partial(self._before_step, trainer), self._after_step)

    def _begin_batch(self, trainer: Trainer, pl_module: LightningModule, phase: str, moment: Moment) -> PhaseDump | None:
        """Collective where the module is sharded, if a rollout begins or other ranks take part. Begin a batch."""
        dump = self._phases.get(phase)
        self._current = None
        if dump is None:
            return None
        rollout = self._rollout(trainer)
        if not dump.options.selects(rollout):
            dump.close(commit=True)
            return None
        if self._is_sharded:
            self._agree(trainer, pl_module, dump, rollout, moment)
        elif trainer.is_global_zero and not (dump.rollout == rollout and dump.is_next(moment)):
            dump.close(commit=True)
            dump.open(dump.begin(rollout, clean=self._is_fresh), rollout, pl_module)
        if not dump.is_open:
            return None
        self._current = dump
        dump.begin_batch(moment)
        return dump

    def _agree(self, trainer: Trainer, pl_module: LightningModule, dump: PhaseDump, rollout: int, moment: Moment) -> None:
        """Collective, if a rollout begins or others take part than before. Have the ranks of one replica write together."""
        strategy: Any = trainer.strategy
        key = (rollout, getattr(strategy, "num_changes", 0))
        known, latest = self._agreed.get(dump.phase, (None, moment))
        self._agreed[dump.phase] = key, moment
        if known == key and moment.follows(latest):
            return
        dump.close(commit=True)
        agreed = None
        while agreed is None:  # the rank that was to say it is gone
            offer = None
            if trainer.is_global_zero:
                members = self._replica(trainer)
                offer = dump.begin(rollout, len(members), clean=self._is_fresh), members
            agreed = strategy.broadcast(offer)
        path, self._members = agreed
        own = strategy.engine.slot if hasattr(strategy, "engine") else trainer.global_rank
        if own in self._members:
            dump.open(path, rollout, pl_module, self._members.index(own))

    @staticmethod
    def _replica(trainer: Trainer) -> tuple[int, ...]:
        """Return who holds a copy of the module together with this rank."""
        replica = getattr(trainer.strategy, "replica", None)
        return tuple(range(trainer.world_size)) if replica is None else tuple(replica.slots)

    def _begin_pass(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        if trainer.sanity_checking:
            return
        self._prepare(trainer, pl_module)
        dump = self._begin_batch(trainer, pl_module, phase, Moment(trainer.global_step, -1))
        if dump is not None:
            dump.resume(pl_module)
            dump.dump_state(pl_module, Moment(trainer.global_step, 0))
        self._end_batch()

    def _begin_evaluation_batch(self, trainer: Trainer, phase: str, batch_idx: int, dataloader_idx: int) -> None:
        dump = self._phases.get(phase)
        if dump is not None and dump.is_open and not trainer.sanity_checking:
            self._current = dump
            dump.begin_batch(Moment(trainer.global_step, batch_idx, dataloader_idx))

    def _end_batch(self) -> PhaseDump | None:
        dump, self._current = self._current, None
        if dump is not None:
            dump.end_batch()
        return dump

    def _end_pass(self, trainer: Trainer, phase: str) -> None:
        dump = self._phases.get(phase)
        if dump is not None and not trainer.sanity_checking:
            dump.commit()
            dump.pause()

    def _is_replica(self, trainer: Trainer) -> bool:
        """Whether the ranks that write are still those that began to: in a step under way others may have taken over."""
        return not self._is_sharded or self._replica(trainer) == self._members

    def _close(self, phase: str, *, commit: bool) -> None:
        self._end_batch()
        if (dump := self._phases.get(phase)) is not None:
            dump.close(commit=commit)

    def _finish(self) -> None:
        """End all that was begun; what is not marked by now never will be."""
        self._end_batch()
        for dump in self._phases.values():
            self.peak_bytes = max(self.peak_bytes, dump.peak_bytes)
            dump.end()
        self._phases.clear()
        self._agreed.clear()
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._run is not None:
            self._run.close()
            self._run = None

    # The steps of the module.

    def _before_step(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        recorder = self._current.recorder if self._current is not None else None
        if recorder is None:
            return
        # What a strategy says of the latest training batch says nothing of a batch of another phase.
        is_own = self._current is None or self._current.phase != "train" or getattr(trainer.strategy, "has_own_batch", True)
        recorder.begin_pass(counts=bool(is_own))
        batch = args[0] if args else next(iter(kwargs.values()), None)
        if recorder.selects("batch", ""):
            recorder.record("batch", "", batch)

    def _after_step(self, name: str, output: Any) -> None:
        kind = "prediction" if name == "predict_step" else "loss"
        recorder = self._current.recorder if self._current is not None else None
        if recorder is None or not recorder.selects(kind, ""):
            return
        if kind == "loss" and isinstance(output, Mapping):
            output = output.get("loss")
        recorder.record(kind, "", output)

    # Checks.

    def _tell_what_matches_nothing(self, pl_module: LightningModule) -> None:
        patterns = {pattern: None for options in self._options.values() if options.enable for pattern in options.filter}
        for pattern in without_match(list(patterns), pl_module):
            log.warning("`TensorDump(filter=[%r])` matches nothing in %s.", pattern, type(pl_module).__name__)

    def _check(self, trainer: Trainer) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):
            raise MisconfigurationException(
                "`TensorDump` with `FSDPStrategy`, which keeps parameters as parts of one vector: they can't be dumped. Use"
                " `FTStrategy(shard_size=...)` or `ModelParallelStrategy`."
            )
        callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        same = [c for c in callbacks if isinstance(c, TensorDump) and (c.dirpath, c.role) == (self.dirpath, self.role)]
        if len(same) > 1:
            raise MisconfigurationException(
                f"Two `TensorDump(..., role={self.role!r})` write to {self.dirpath}. Give each its own `role`."
            )
