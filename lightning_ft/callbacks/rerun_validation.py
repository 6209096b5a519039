"""Validates each optimizer step before it is applied, and runs it again when a value is not what it should be."""

import os
import platform
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS
from typing_extensions import override

from lightning_ft.elastic.checks import check_choice, check_type
from lightning_ft.loops.rejections import Rejections
from lightning_ft.loops.rerun_checkpoint import RerunCheckpoint
from lightning_ft.loops.rolling_replay import ReplayOptions
from lightning_ft.loops.validated_steps import ValidatedSteps
from lightning_ft.rerun.findings import SecondOpinion
from lightning_ft.rerun.policy import Policy
from lightning_ft.rerun.state_machine import RerunStateMachine
from lightning_ft.rerun.states import RerunMode
from lightning_ft.rerun.step_values import StepValidation
from lightning_ft.rerun.tracker import read_iterations_to_skip
from lightning_ft.trainer.ranks import TrainerRanks


class RerunValidation(Callback):
    """Runs a step again when its loss or gradient is NaN, infinite or unexpectedly large, before anything of it is applied.

    If the rerun computes something else, the error was transient, and training goes on with what the rerun computed. If it
    computes the same, the value is correct, and so the data or the model to blame, or the device computes it wrongly every
    time. The other replicas tell: each runs the step's batches of another one. Where none can be asked (there is one
    device, or one sharded replica), Megatron-LM's way is gone: a value that must not be applied (NaN, infinity) ends the job
    with a checkpoint and exit code 16. Resumed on another device, with :class:`~lightning_ft.callbacks.LoaderPosition`, the
    job begins with that step and says what it was. Tracker file and exit codes (16, 17) are Megatron's.

    Works under FTStrategy, ``ddp``, FSDP2 (``ModelParallelStrategy``) and on a single device, in automatic optimization.
    A module may have values of its own validated within ``training_step``: :meth:`validate`.

    Args:
        mode: ``"validate_results"``; ``"report_determinism_stats"``: run each step twice and log how far values differ;
            ``"disabled"``: a value that must not be applied is an error at once.
        on_correct: What becomes of a step with a NaN or an infinity that another device computes as well.
            ``"skip_batch"``: nothing of it stays, neither in the weights nor in logged values and metrics;
            ``"skip_update"``: the weights stay as they are; ``"apply"``; ``"stop"``: the job ends with code 17.
        on_spike: The same for a value that is unexpectedly large, and comes out so again.
        on_persistent: What becomes of a rank that computes a value wrongly each time, as the others find out. ``"exclude"``:
            under FTStrategy it is removed, and started again; the others commit the same step without it, and its batch
            is trained later. Elsewhere, and with ``"stop"``, the job ends with code 17.
        without_opinion: What a NaN or an infinity means that the same device computes twice if there is no other one to
            ask. ``"checkpoint"``: the job ends with code 16; ``"assume_correct"``: ``on_correct`` applies.
        tolerance: By what part two runs of a step may differ and still count as the same.
        validate_parameters: Whether the norm of all parameters is validated, too, as each step left them: before the next
            one is applied, and after the last one. If they are not finite, and elsewhere neither, leaving steps out mends
            nothing: the job ends with code 17, unless ``on_correct="apply"``.
        tracker_file: Where rejected values are written down, a line each. Steps in which the same rank failed in several
            jobs are left out: their batches are trained without effect.
        replay: How far back, and when, earlier steps are run again to find where values began to be wrong; None: never.

    Raises:
        ValueError: If an argument is not valid.
        MisconfigurationException: If the fit can't be run again step by step.

    Example::

        Trainer(strategy=FTStrategy(), callbacks=[RerunValidation()])

    """

    def __init__(
        self,
        mode: Literal["validate_results", "report_determinism_stats", "disabled"] = "validate_results",
        *,
        on_correct: Literal["apply", "skip_update", "skip_batch", "stop"] = "skip_batch",
        on_spike: Literal["apply", "skip_update", "skip_batch", "stop"] = "apply",
        on_persistent: Literal["exclude", "stop"] = "exclude",
        without_opinion: Literal["checkpoint", "assume_correct"] = "checkpoint",
        tolerance: float = 1e-3,
        validate_parameters: bool = False,
        tracker_file: str | None = None,
        replay: ReplayOptions | None = None,
    ) -> None:
        check_choice("RerunValidation", "mode", mode, [m.value for m in RerunMode])
        self.mode = RerunMode(mode)
        self.policy = Policy(on_correct, on_spike, on_persistent, without_opinion)
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 2:
            raise ValueError(f"`RerunValidation(tolerance={tolerance!r})` is not valid: expected a number from 0 to 2.")
        self.tolerance = float(tolerance)
        check_type("RerunValidation", "validate_parameters", validate_parameters, bool, "True or False")
        self.validate_parameters = validate_parameters
        if tracker_file is not None:
            check_type("RerunValidation", "tracker_file", tracker_file, str, "the path of a file, or None")
        self.tracker_file = tracker_file
        if replay is not None:
            check_type("RerunValidation", "replay", replay, ReplayOptions, "`ReplayOptions` or None")
        self.replay = replay
        self.second_opinion: SecondOpinion | None = None
        """Asks another device about values that this one computed twice, in place of the other replicas."""
        self.machine: RerunStateMachine | None = None
        self._rejections = Rejections()
        self._values = StepValidation(self.tolerance)
        self._checkpoint = RerunCheckpoint({})
        self._steps: ValidatedSteps | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def rows(self) -> deque[dict[str, Any]]:
        """What was rejected: step, rank, value, expected range, verdict and what was done about it; the newest ones."""
        return self._rejections.rows

    @property
    def replays(self) -> deque[dict[str, Any]]:
        """What came out when earlier steps were run again: in which step, in what and on which ranks they differ first."""
        return self._rejections.replays

    @property
    def counts(self) -> dict[str, int]:
        """How many values were rejected, and how many of them turned out to be what."""
        return self._rejections.counts

    def validate(
        self,
        name: str,
        value: Any,
        reject: Callable[[Any], Any] | None = None,
        compare: Callable[[Any, Any], float] | None = None,
        tolerance: float | None = None,
        fatal: bool = True,
    ) -> bool:
        """Validate a value of the module's own in ``training_step``; return whether it was accepted.

        Args:
            name: What it is; the same in each step.
            value: A number, a tensor of one element, or what ``compare`` knows.
            reject: Whether it is bad; default: if it is not finite.
            compare: How far two of them are apart; default: their relative difference.
            tolerance: How far they may be; default: that of this callback.
            fatal: Whether a bad one must not be applied.

        """
        if self._steps is None:
            return True
        return self._steps.validate(name, value, reject, compare, self.tolerance if tolerance is None else tolerance, fatal)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_optimizers(trainer)
        self.machine = machine = RerunStateMachine(
            self.mode,
            ranks=TrainerRanks(trainer),
            device=_name_device(trainer),
            result_rejected_tracker_filename=self.tracker_file,
            restores_random_state=False,
            job=_name_job(trainer),
        )
        skipped = [] if self.tracker_file is None else read_iterations_to_skip(self.tracker_file)
        if self._loaded is not None:
            machine.load_state_dict(self._loaded)
            self._loaded = None
        self._steps = ValidatedSteps(
            trainer,
            pl_module,
            machine,
            self._values,
            self.policy,
            self._rejections,
            self._checkpoint,
            trainer.strategy.broadcast(skipped),  # who comes back later finds more lines in the file
            self.validate_parameters,
            self.replay,
        )
        self._steps.second_opinion = self.second_opinion

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.end_epoch()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.end_training()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self.machine is not None:
            self.machine.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.machine is not None:
            self.machine.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"values": self._values.state_dict(), "counts": dict(self.counts), "digests": self._checkpoint.state_dict()}
        return state | ({} if self.machine is None else {"machine": self.machine.state_dict()})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.load_state_dict(state_dict["values"])
        self.counts.update(state_dict["counts"])
        self._checkpoint = RerunCheckpoint(state_dict.get("digests", {}))
        self._loaded = state_dict.get("machine")


def _check(trainer: Trainer, pl_module: LightningModule) -> None:
    strategy: Any = trainer.strategy
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            "`RerunValidation` needs automatic optimization: in manual optimization `training_step` changes the weights"
            " itself, so that it can't be run again."
        )
    if strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"`RerunValidation` with `{type(strategy).__name__}`, which steps the optimizer by itself, is not supported. Use"
            " `FTStrategy`, `ddp`, `ModelParallelStrategy` or a single device."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "`RerunValidation` with `training_step(dataloader_iter)`: its batches are not known."
        )


def _check_optimizers(trainer: Trainer) -> None:
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers) and trainer.accumulate_grad_batches > 1:
        raise MisconfigurationException(
            "`RerunValidation` with LBFGS and `accumulate_grad_batches`: LBFGS runs the last batch of a step several"
            " times, on the gradients of those before. Use one batch a step, or another optimizer."
        )


def _name_device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return f"{device.type}:{trainer.local_rank if device.index is None else device.index}"


def _name_job(trainer: Trainer) -> str:
    """The same on all ranks, and another one in each job, where no launcher has given it a name."""
    own = os.environ.get("SLURM_JOBID") or os.environ.get("TORCHELASTIC_RUN_ID") or f"{platform.node()}-{os.getpid()}"
    return str(trainer.strategy.broadcast(own))
