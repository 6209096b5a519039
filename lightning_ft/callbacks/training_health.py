"""TrainingHealth: says after every restart whether the training went on as before, who is slow, and where the time goes."""

import logging
from typing import Any, Literal

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ft.elastic.checks import check_choice, check_count, check_positive
from lightning_ft.errors import DiscontinuityError
from lightning_ft.health.batch_clock import BatchClock
from lightning_ft.health.gradient_norm import gradient_norm
from lightning_ft.health.monitor import Conclusions, HealthMonitor, Membership
from lightning_ft.health.restarts import Verdict
from lightning_ft.trainer.checkpoint_time import CheckpointTime
from lightning_ft.trainer.going_back import go_back, newest_until

log = logging.getLogger(__name__)


class TrainingHealth(Callback):
    """Watches a training over its restarts.

    After each death, rejoin, resumption and rollback, losses and gradient norms of the next steps are compared with those
    before, and a verdict is logged: they go on (``continuous``), they do not (``spike``, ``drop``, ``nan``), or too few are
    known to tell (``undecided``). Ranks that are slower than the others are named. Goodput, the useful part of the wall
    time, and what the rest was lost to, go to the loggers under ``ft/`` with all else, and go on in a run that resumes this
    one.

    Every few steps the ranks exchange one small message, from which all of them draw the same conclusions. Under FTStrategy
    a rank's own part of a step is all but waiting for others; under strategies that do not tell, it is the forward passes.

    Args:
        on_discontinuity: What follows a ``spike``, ``drop`` or ``nan`` after a restart. ``"warn"``: only that it is told.
            ``"stop"``: the training ends on all ranks with an error. ``"rollback"``: weights and optimizer state are loaded
            from the newest intact checkpoint from before that restart, and the training goes on with the batches and the
            learning rate that come next; if that is no better, or there is no such checkpoint, it ends as with ``"stop"``.
            So keep enough of them: ``save_top_k`` of checkpoint callbacks.
        on_straggler: What follows when a rank takes half as long again as the others for some time: ``"warn"``, or
            ``"exclude"``, which has FTStrategy remove it and start it again.
        window: How many steps after a restart are looked at.
        every_n_train_steps: How often the ranks exchange what they saw.
        track_grad_norm: Whether norms of gradients are computed and compared, too.
        flops_per_batch: Floating point operations of a batch on one device, for ``ft/mfu``; by default the module's
            attribute of this name, if it has one.
        peak_flops: Those that a device can do in a second; by default what Lightning knows of the device.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: If ``on_straggler="exclude"`` is asked for under another strategy than FTStrategy.

    Example::

        Trainer(strategy=FTStrategy(), callbacks=[TrainingHealth()])

    """

    def __init__(
        self,
        on_discontinuity: Literal["warn", "stop", "rollback"] = "warn",
        on_straggler: Literal["warn", "exclude"] = "warn",
        *,
        window: int = 20,
        every_n_train_steps: int = 10,
        track_grad_norm: bool = True,
        flops_per_batch: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        name = type(self).__name__
        check_choice(name, "on_discontinuity", on_discontinuity, ("warn", "stop", "rollback"))
        check_choice(name, "on_straggler", on_straggler, ("warn", "exclude"))
        check_count(name, "window", window, least=2)
        check_count(name, "every_n_train_steps", every_n_train_steps, least=1)
        check_positive(name, "flops_per_batch", flops_per_batch)
        check_positive(name, "peak_flops", peak_flops)
        self.on_discontinuity = on_discontinuity
        self.on_straggler = on_straggler
        self.every_n_train_steps = every_n_train_steps
        self.track_grad_norm = track_grad_norm
        self.flops_per_batch = flops_per_batch
        self.peak_flops = peak_flops
        self._monitor = HealthMonitor(window, every_n_train_steps)
        self._clock = BatchClock()
        self._losses: list[Tensor] = []
        self._norms: dict[int, Tensor] = {}
        self._num_batches = 0
        self._checkpoints: CheckpointTime | None = None
        self._checkpoint_seconds = self._waited = 0.0
        self._mfu: float | None = None
        self._logged_at = 0
        self._is_running = False

    @property
    def verdicts(self) -> list[Verdict]:
        """Those of the newest restarts, of this run and of those that it resumes."""
        return list(self._monitor.verdicts)

    def report(self) -> dict[str, float]:
        """Return the values that are logged now, by the names that they have there."""
        values = self._monitor.report()
        if self._mfu is not None:
            values["mfu"] = self._mfu
        return {f"ft/{name}": value for name, value in values.items()}

    # Hooks.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        if self.on_straggler == "exclude" and not hasattr(trainer.strategy, "exclude"):
            raise MisconfigurationException(
                f'`{type(self).__name__}(on_straggler="exclude")` needs a strategy that goes on without a rank. Use'
                ' `Trainer(strategy=FTStrategy())`, or `on_straggler="warn"`.'
            )
        self._monitor.goodput.begin()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checkpoints = CheckpointTime(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        joins = getattr(trainer.strategy, "has_joined", False)
        self._monitor.start(trainer.global_step, _members(trainer), joins=joins)
        self._waited = getattr(trainer.strategy, "seconds_waited", 0.0)
        self._logged_at = trainer.global_step
        self._forget_batches()
        self._clock.start()
        self._checkpoint_seconds = 0.0 if self._checkpoints is None else self._checkpoints.seconds
        self._is_running = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < self._monitor.step:
            self._monitor.go_back(trainer.global_step)
            self._forget_batches()
        self._clock.begin_forward()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._clock.end_forward()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Collective in the replica, if the module is sharded."""
        norm = gradient_norm(optimizer) if self.track_grad_norm else None
        if norm is not None:
            if getattr(trainer.precision_plugin, "scaler", None) is not None:
                norm = torch.where(norm.isfinite(), norm, 0.0)  # the scale was too large: the step is not applied
            self._norms[id(optimizer)] = norm

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collective, every so many steps."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1 and getattr(trainer.strategy, "has_own_batch", True):
            self._losses.append(loss.detach())
        self._num_batches += 1
        self._clock.end_batch(aside=self._count_saving())
        before, step = self._monitor.step, trainer.global_step
        if step > before:
            self._end_step(trainer, pl_module)
            if step // self.every_n_train_steps > before // self.every_n_train_steps:
                self._exchange(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.begin_aside()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.end_aside()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective."""
        self._count_saving()
        self._exchange(trainer, is_last=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._is_running = False
        self._monitor.goodput.pause()

    # State.

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._monitor.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict, is_running=self._is_running)

    # Steps.

    def _forget_batches(self) -> None:
        self._losses, self._norms, self._num_batches = [], {}, 0
        self._clock.clear()

    def _count_saving(self) -> float:
        """Return how long checkpoints kept the training waiting since this was asked last."""
        assert self._checkpoints is not None
        before, self._checkpoint_seconds = self._checkpoint_seconds, self._checkpoints.seconds
        self._monitor.goodput.lose("checkpoint", self._checkpoint_seconds - before)
        return self._checkpoint_seconds - before

    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds, own = self._clock.seconds, self._clock.forward
        waited = getattr(trainer.strategy, "seconds_waited", None)
        if waited is not None:
            own, self._waited = seconds - (waited - self._waited), waited
        self._mfu = self._utilization(trainer, pl_module, seconds)
        self._monitor.end_step(
            trainer.global_step,
            seconds=seconds,
            own_seconds=own,
            losses=self._losses,
            norm=torch.stack(list(self._norms.values())).norm() if self._norms else None,
            members=_members(trainer),
        )
        self._forget_batches()

    def _utilization(self, trainer: Trainer, pl_module: LightningModule, seconds: float) -> float | None:
        flops = self.flops_per_batch or getattr(pl_module, "flops_per_batch", None)
        if flops is None or not seconds:
            return None
        if self.peak_flops is None:
            dtype = _plugin_to_compute_dtype(trainer.precision_plugin)
            self.peak_flops = float(get_available_flops(trainer.strategy.root_device, dtype) or 0.0)
        return float(flops) * self._num_batches / seconds / self.peak_flops if self.peak_flops else None

    # Conclusions.

    def _exchange(self, trainer: Trainer, *, is_last: bool = False) -> None:
        """Collective. Learn what the ranks saw since the last time, and act on it, all ranks alike."""
        strategy: Any = trainer.strategy
        slot = trainer.global_rank
        if hasattr(strategy, "members"):
            slot = strategy.members[strategy.global_rank]
        rows = torch.tensor(self._monitor.row(slot), device=strategy.root_device)
        if trainer.world_size > 1:
            rows = strategy.all_gather(rows)
        found = self._monitor.conclude(rows.view(-1, rows.shape[-1]).tolist(), is_last=is_last)
        if trainer.is_global_zero:
            self._tell(trainer, found)
        self._show(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (is_last or trainer.global_step - self._logged_at >= every):
            self._log(trainer)
        for straggler in found.stragglers:
            # It may have died since, as all ranks will learn.
            if self.on_straggler == "exclude" and trainer.is_global_zero and straggler.slot in strategy.members:
                strategy.exclude(straggler.slot, str(straggler))
        bad = next((verdict for verdict in found.verdicts if verdict.is_bad), None)
        if bad is not None and self.on_discontinuity != "warn":
            self._react(trainer, bad, is_last=is_last)

    def _react(self, trainer: Trainer, bad: Verdict, *, is_last: bool) -> None:
        """Collective. Go back to what was before the restart, or end the training."""
        found = None
        if self.on_discontinuity == "rollback" and "rollback" not in bad.reason and not is_last:
            found = newest_until(trainer, bad.step)
        if found is None:
            raise DiscontinuityError(bad.step, bad.reason, str(bad))
        path, step = found
        if trainer.is_global_zero:
            log.warning("Going back to the weights of step %s, from %s; training goes on with the next batches.", step, path)
            events = getattr(trainer.strategy, "events", None)
            if events is not None:
                events.emit("taken_back", step=trainer.global_step, to=step, path=path)
        go_back(trainer, path)
        self._monitor.take_back(step)

    def _tell(self, trainer: Trainer, found: Conclusions) -> None:
        events = getattr(trainer.strategy, "events", None)
        for values in found.steps:
            if events is not None and values.known:
                events.emit("metrics", step=values.step, **values.known)
        for verdict in found.verdicts:
            log.log(logging.WARNING if verdict.is_bad else logging.INFO, "Training %s.", verdict)
            if events is not None:
                events.emit("verdict", **vars(verdict))
        for values in found.unusual:
            log.warning("Unusual values in %s.", values)
        for straggler in found.stragglers:
            log.warning("Straggler: %s.", straggler)
            if events is not None:
                events.emit("straggler", **{**vars(straggler), "slot": events.slot, "straggler": straggler.slot})
        for slot, since in self._monitor.outages.overdue(self._monitor.step).items():
            log.warning("Slot %s is away since step %s.", slot, since)

    def _log(self, trainer: Trainer) -> None:
        self._logged_at = trainer.global_step
        events, goodput = getattr(trainer.strategy, "events", None), self._monitor.goodput
        if events is not None and trainer.is_global_zero:
            lost = {f"lost_{kind}": round(seconds, 3) for kind, seconds in goodput.lost.items()}
            told = {"seconds": round(goodput.seconds, 3), "goodput": round(goodput.fraction, 4)}
            events.emit("goodput", step=trainer.global_step, **told, **lost)
        for logger in trainer.loggers:
            logger.log_metrics(self.report(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            logger.save()

    def _show(self, trainer: Trainer) -> None:
        shown: dict[str, Any] = trainer._logger_connector._progress_bar_metrics
        shown["goodput"] = self._monitor.goodput.fraction
        if self._monitor.outages.last:
            shown["last_fault"] = self._monitor.outages.last


def _members(trainer: Trainer) -> Membership:
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "num_changes"):
        world = trainer.world_size
        return Membership(0, tuple(range(world)), world, world, world)
    live, replicas = strategy.replicas
    return Membership(strategy.num_changes, strategy.members, strategy.num_processes, live, replicas)
