"""How a job ends that is asked to: the ranks agree on their last step, save one checkpoint and exit with code 143.

A signal handler only takes a note: a collective in it would wait for ranks that received no signal. What was noted
travels with the reductions that run anyway; where there are none, in evaluations, the rank breaks off what all are in.
"""

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ft.elastic.engine import Engine
from lightning_ft.strategies import slurm
from lightning_ft.strategies.boundary import settle_counters

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM  # what a shell says of a process that SIGTERM ended


class Preemption:
    """Notes that this rank was asked to stop, and ends the call once the ranks agreed to.

    Args:
        trainer: The trainer of the call.
        engine: Of the job.

    """

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._signal: int | None = None
        self._requeue = False
        self._is_torn_down = False
        self.agreed = False
        """Whether all ranks know that they stop; only then they may call collectives about it."""
        self.has_trained = False
        """Whether this call committed a step."""
        self.validation_due = False
        """Whether the ranks stop before a validation that was due."""

    @property
    def asked(self) -> bool:
        """Whether this rank received SIGTERM or the signal that requeues a SLURM job."""
        return self._signal is not None

    def listen(self) -> None:
        """Put notes in the place of Lightning's handlers, which call collectives wherever the signal finds them."""
        connector = self._trainer._signal_connector
        connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[method-assign,assignment]
        connector._slurm_sigusr_handler_fn = self._on_requeue_signal  # type: ignore[method-assign,assignment]
        # Lightning takes its handlers away at the end of its part of the call. A rank that is through with that may still
        # wait for the others, and a signal would end it there.
        connector.teardown = self._on_teardown  # type: ignore[method-assign]

    def stop_listening(self, *, is_over: bool) -> None:
        """Let Lightning take its handlers away, at once if the call is over; otherwise it will, after ``on_exception``."""
        connector = self._trainer._signal_connector
        connector.__dict__.pop("teardown", None)
        if not is_over:
            return
        if self._is_torn_down:
            connector.teardown()
        if self._signal is not None and signal.getsignal(self._signal) == signal.SIG_DFL:
            signal.raise_signal(self._signal)  # too late for this call: as if it came now

    def _on_teardown(self) -> None:
        self._is_torn_down = True

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        self._signal = self._signal or signum
        self._engine.ask_to_stop(signum)

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        self._signal, self._requeue = self._signal or signum, True

    # Agreement.

    def agree(self) -> None:
        """Stop at the end of the batch under way; all ranks call this at the same one."""
        self.agreed = self._trainer._signal_connector.received_sigterm = True

    def ask_all(self, where: str) -> bool:
        """Collective. Return whether any rank was asked to stop; then all stop."""
        self.agreed = self.agreed or any(row[0] for row in self._tell(where, bytes([self.asked])))
        return self.agreed

    def _tell(self, where: str, note: bytes) -> list[bytes]:
        return self._engine.run(f"stop {where}?", lambda exchange: exchange.inline, inline=note)

    def after_validation(self) -> None:
        """Collective. Learn whether a rank was asked to stop meanwhile; then all stop at the end of the batch under way."""
        if self.ask_all("after validation"):
            self.agree()

    def before_evaluation_batch(self, agree: Callable[[int], int] = lambda number: number) -> None:
        """Break off an evaluation if this rank was asked to stop: it may go on for long without any collective.

        Args:
            agree: Returns the largest number among the ranks that can leave the evaluation only together.

        """
        number = agree(self._signal or 0)
        if number:
            self._engine.interrupt(number)

    # The end.

    def conclude(self) -> None:
        """Collective. Save a checkpoint, if something was trained, and have SLURM start the job again if it asked to."""
        rows = self._tell("how", bytes([self._requeue, self.has_trained]))
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING and any(row[1] for row in rows):
            try:
                self._save()
            except Exception:
                log.exception("The checkpoint of a job that was asked to stop could not be saved.")
        if any(row[0] for row in rows) and self._engine.rank == 0:
            slurm.requeue()

    def forget(self) -> None:
        """Remove the checkpoint of an earlier run that was asked to stop: this one went past it, to its own end."""
        if self._trainer.state.fn == TrainerFn.FITTING and self._engine.rank == 0:
            for path in self._last_paths():
                self._trainer.strategy.remove_checkpoint(path)

    def _save(self) -> None:
        trainer = self._trainer
        paths = self._paths()
        if not paths:
            return
        for path in paths:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            settle_counters(checkpoint, trainer, validation_due=self.validation_due or trainer.validating)
            trainer.strategy.save_checkpoint(checkpoint, path)
        rank_zero_info(f"Asked to stop after step {trainer.global_step}: saved {' and '.join(paths)}.")
        for callback in self._checkpoint_callbacks():
            callback._last_global_step_saved = trainer.global_step  # so that `save_on_exception` does not save it again

    def _paths(self) -> list[str]:
        """The files that a next run looks for: by itself under SLURM, and with ``ckpt_path="last"``."""
        trainer = self._trainer
        paths = self._last_paths()
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and not self._is_dry:
            paths.insert(0, slurm.checkpoint_path(trainer))
        return paths

    def _last_paths(self) -> list[str]:
        paths = []
        for callback in self._checkpoint_callbacks()[: 0 if self._is_dry else 1]:
            assert callback.dirpath is not None
            # One name, so that a job that is preempted again and again leaves one file.
            name = f"{callback.CHECKPOINT_NAME_LAST}-preempted{callback.FILE_EXTENSION}"
            paths.append(os.path.join(callback.dirpath, name))
        return paths

    @property
    def _is_dry(self) -> bool:
        return bool(self._trainer.fast_dev_run)  # type: ignore[attr-defined]

    def _checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [callback for callback in self._trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def stopped() -> SIGTERMException:
    """Return the exception that ends a Trainer call of a job that was asked to stop."""
    return SIGTERMException(EXIT_CODE)
