"""Where in a fit a checkpoint is taken, and how another fit continues from exactly there.

Lightning tells it from its counters when it resumes, but they differ only between some of the places. Here it is written
down as the checkpoint is made, and the loops of the fit that resumes are put there directly: to them it is no resumption.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage as ValidationStage
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

Moment = dict[str, Any]
"""``within_epoch``, ``epochs`` completed, and within an epoch: batches ``trained``, how many more were trained but
``given_up``, and what is left to do before the next batch (``tail``)."""


class FitMoments:
    """Watches the loops of one fit.

    Args:
        trainer: Its trainer.

    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._epoch = 0
        self._through = (0, 0)
        self._has_validated = False
        self._replaced: list[tuple[Any, str, Any]] = []
        self.on_fit: Callable[[Callable[[], None]], None] = lambda proceed: proceed()
        self.on_fit_loop_start: Callable[[Callable[[], None]], None] = lambda proceed: proceed()
        self.on_epoch_loop_start: Callable[[Any, Callable[[], None]], None] = lambda fetcher, proceed: proceed()
        self.on_validation: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Begin to watch."""
        fit_loop: Any = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        run, start_fit, start_epoch = fit_loop.run, fit_loop.on_run_start, epoch_loop.on_run_start
        end_batch, validate = epoch_loop.on_advance_end, epoch_loop.val_loop.run
        end_validation = epoch_loop.val_loop._on_evaluation_end

        def start_epoch_loop(data_fetcher: Any) -> None:
            self._epoch, self._through = fit_loop.epoch_progress.current.started, (0, 0)
            self.on_epoch_loop_start(data_fetcher, lambda: start_epoch(data_fetcher))

        def end_advance(data_fetcher: Any) -> None:
            end_batch(data_fetcher)
            self._through = (self._epoch, epoch_loop.batch_progress.current.ready)

        def run_validation() -> Any:
            self._has_validated = False
            vars(epoch_loop).pop("_should_check_val_fx", None)
            if not self._trainer.sanity_checking:
                self.on_validation()
            return validate()

        def end_evaluation(*args: Any, **kwargs: Any) -> None:
            self._has_validated = True
            end_validation(*args, **kwargs)

        self._replace(fit_loop, "run", lambda: self.on_fit(run))
        self._replace(fit_loop, "on_run_start", lambda: self.on_fit_loop_start(start_fit))
        self._replace(epoch_loop, "on_run_start", start_epoch_loop)
        self._replace(epoch_loop, "on_advance_end", end_advance)
        self._replace(epoch_loop.val_loop, "run", run_validation)
        self._replace(epoch_loop.val_loop, "_on_evaluation_end", end_evaluation)

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def close(self) -> None:
        """Leave the loops as they were."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            delattr(owner, name) if before is None else setattr(owner, name, before)

    def now(self, *, gives_up_windows: bool) -> Moment:
        """Return where the fit is.

        Args:
            gives_up_windows: Whether batches that were only accumulated so far will be trained again.

        """
        trainer = self._trainer
        epochs: Any = trainer.fit_loop.epoch_progress.current
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        batches = progress.current
        if epochs.processed == epochs.started or self._epoch != epochs.started:
            return {
                "within_epoch": False,
                "epochs": epochs.processed,
                "plateau_due": epochs.completed < epochs.processed,
            }
        trained = batches.processed
        is_within_batch = batches.processed < batches.ready
        is_accumulating = trained % trainer.accumulate_grad_batches > 0 and (is_within_batch or self._accumulates)
        given_up = trained % trainer.accumulate_grad_batches if is_accumulating and gives_up_windows else 0
        if is_accumulating and is_within_batch:  # the gradients may hold part of this batch
            given_up = trained % trainer.accumulate_grad_batches
        is_at_batch = not given_up and not is_within_batch
        return {
            "within_epoch": True,
            "epochs": epochs.processed,
            "trained": trained - given_up,
            "given_up": given_up,
            "is_accumulating": is_accumulating and not given_up,
            "is_last_batch": progress.is_last_batch and is_at_batch,
            "tail": self._tail if is_at_batch else "",
        }

    @property
    def _accumulates(self) -> bool:
        return self._trainer.fit_loop.epoch_loop._should_accumulate()

    @property
    def _tail(self) -> str:
        """What is left to do after the last batch: the rest of it, all of a validation, or all after the validation."""
        state = self._trainer.state
        if state.fn == TrainerFn.FITTING and state.stage == RunningStage.VALIDATING:
            return "after validation" if self._has_validated else "validation"
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return "" if not ready or self._through == (self._epoch, ready) else "end of batch"


def without_window(moment: Moment, num_batches: int) -> Moment:
    """Return the moment before the ``num_batches`` that were accumulated and are trained again."""
    return moment | {
        "trained": moment["trained"] - num_batches,
        "given_up": num_batches,
        "is_accumulating": False,
        "is_last_batch": False,
        "tail": "",
    }


def enter_fit(trainer: Trainer, loops: dict[str, Any], moment: Moment) -> None:
    """Put the fit loop where it was; called when all of Lightning's own restoration is through."""
    fit_loop, epochs = trainer.fit_loop, deepcopy(loops["epoch_progress"])
    for progress in epochs.values():
        begun = progress["processed"] + moment["within_epoch"]
        progress.update(ready=begun, started=begun, completed=progress["processed"])
    fit_loop.epoch_progress.load_state_dict(epochs)
    stages: Any = fit_loop
    stages._restart_stage = RestartStage.RESTARTED_MID_EPOCH if moment["within_epoch"] else RestartStage.NONE
    fit_loop._restarting = fit_loop.epoch_loop._restarting = fit_loop.epoch_loop.val_loop._restarting = False
    fit_loop.epoch_loop._batches_that_stepped = loops["epoch_loop.state_dict"]["_batches_that_stepped"]


def enter_epoch(trainer: Trainer, loops: dict[str, Any], moment: Moment) -> None:
    """Put the epoch loop where it was; called after it was reset as if for a new epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    batches = deepcopy(loops["epoch_loop.batch_progress"])
    in_total = batches["total"]["processed"] - moment["given_up"]
    for name, count in (("current", moment["trained"]), ("total", in_total)):
        batches[name].update(ready=count, started=count, processed=count, completed=count)
    batches["is_last_batch"] = moment["is_last_batch"]
    epoch_loop.batch_progress.load_state_dict(batches)
    for name, loop in (
        ("scheduler_progress", epoch_loop),
        ("automatic_optimization.optim_progress", epoch_loop.automatic_optimization),
        ("manual_optimization.optim_step_progress", epoch_loop.manual_optimization),
    ):
        progress = deepcopy(loops[f"epoch_loop.{name}"])
        _level(progress)
        getattr(loop, name.rpartition(".")[2]).load_state_dict(progress)


def _level(progress: dict[str, Any]) -> None:
    """Have what was begun and not completed begin again."""
    if "completed" in progress:
        progress.update({name: progress["completed"] for name in ("ready", "started") if name in progress})
        return
    for value in progress.values():
        _level(value)


def finish_batch(trainer: Trainer, data_fetcher: Any, tail: str) -> None:
    """Have the epoch loop do what was left to do after the last batch, before it trains another one."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    if tail == "after validation" or not (tail == "validation" or epoch_loop._should_check_val_fx(data_fetcher)):
        epoch_loop._skip_next_val = tail == "after validation"
        epoch_loop.on_advance_end(data_fetcher)
        return
    # Lightning goes back to a validation that was broken off, in place of the next batch.
    epoch_loop._restarting = True
    epoch_loop.val_loop._restart_stage = ValidationStage.RESTARTED_MID_EVALUATION
    if tail == "validation":  # due, even if what it depended on was a clock
        epoch_loop._should_check_val_fx = lambda fetcher: True
