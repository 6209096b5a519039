"""Validates each optimizer step before it is applied, and runs it again when a value is not what it should be."""

import logging
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from lightning_ft.elastic.checks import check_choice
from lightning_ft.loops.peer_opinion import PeerOpinion, with_culprits
from lightning_ft.loops.window import StepWindow
from lightning_ft.rerun.batches import digest
from lightning_ft.rerun.exit import RerunExit
from lightning_ft.rerun.findings import Finding, SecondOpinion
from lightning_ft.rerun.gradient_norm import gradient_norm
from lightning_ft.rerun.state_machine import RerunStateMachine
from lightning_ft.rerun.states import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, RerunDiagnostic, RerunMode, RerunState
from lightning_ft.rerun.step_values import LOSS, OVERFLOW, StepValidation
from lightning_ft.trainer.slots import exclude, is_elastic

log = logging.getLogger(__name__)

_SKIPS = ("skip_update", "skip_batch")
_MAX_ROWS = 1000


class RerunValidation(Callback):
    """Runs a step again when its loss or gradient is NaN, infinite or unexpectedly large, before anything of it is applied.

    If the rerun computes something else, the error was transient, and training goes on with what the rerun computed. If it
    computes the same, the value is correct, and so the data or the model to blame, or the device computes it wrongly every
    time. The other replicas tell: each runs the step's batches of another one. Where none can be asked (on one device, or if
    parameters are sharded), Megatron-LM's way is gone: a value that must not be applied (NaN, infinity) ends the job with a
    checkpoint and exit code 16. Resumed on another device, with :class:`~lightning_ft.callbacks.LoaderPosition`, the job
    begins with that step and says what it was. Tracker file and exit codes (16, 17) are Megatron's.

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
        tracker_file: Where rejected values are written down, a line each. Steps in which the same rank failed in several
            jobs are left out: their batches are trained without effect.

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
        tracker_file: str | None = None,
    ) -> None:
        check_choice("RerunValidation", "mode", mode, [m.value for m in RerunMode])
        for name, value in (("on_correct", on_correct), ("on_spike", on_spike)):
            check_choice("RerunValidation", name, value, ("apply", *_SKIPS, "stop"))
        check_choice("RerunValidation", "on_persistent", on_persistent, ("exclude", "stop"))
        check_choice("RerunValidation", "without_opinion", without_opinion, ("checkpoint", "assume_correct"))
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 2:
            raise ValueError(f"`RerunValidation(tolerance={tolerance!r})` is not valid: expected a number from 0 to 2.")
        self.mode = RerunMode(mode)
        self.on_correct, self.on_spike, self.without_opinion = on_correct, on_spike, without_opinion
        self.on_persistent = on_persistent
        self.tolerance = float(tolerance)
        self.tracker_file = tracker_file
        self.rows: deque[dict[str, Any]] = deque(maxlen=_MAX_ROWS)
        """What was rejected: step, rank, value, expected range, verdict and what was done about it; the newest ones."""
        self.second_opinion: SecondOpinion | None = None
        """Asks another device about values that this one computed twice, in place of the other replicas."""
        self.counts = {"rejections": 0, **{diagnostic.value: 0 for diagnostic in RerunDiagnostic}}
        self.machine: RerunStateMachine | None = None
        self.window: StepWindow | None = None
        self._values = StepValidation(self.tolerance)
        self._skipped: list[int] = []
        self._digests: dict[str, str] = {}
        self._is_resumed = False
        self._loaded: dict[str, Any] | None = None
        self._peers: PeerOpinion | None = None
        self._undo: Callable[[], None] = lambda: None

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
        machine = self.machine
        if machine is None or self.window is None or not self.window.is_open:
            return True  # in a validation, or without a fit
        tolerance = self.tolerance if tolerance is None else tolerance
        return machine.validate_result(value, reject or _is_not_finite, name, compare, tolerance, fatal)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers) and trainer.accumulate_grad_batches > 1:
            raise MisconfigurationException(
                "`RerunValidation` with LBFGS and `accumulate_grad_batches`: LBFGS runs the last batch of a step several"
                " times, on the gradients of those before. Use one batch a step, or another optimizer."
            )
        ranks = _TrainerRanks(trainer)
        self.machine = machine = RerunStateMachine(
            self.mode,
            ranks=ranks,
            second_opinion=self._opinion,
            device=_name_device(trainer),
            result_rejected_tracker_filename=self.tracker_file,
            restores_random_state=False,
            job=_name_job(trainer),
        )
        if self.tracker_file is not None:
            self._skipped = machine.get_skipped_iterations_from_tracker_file(self.tracker_file)
        if self._loaded is not None:
            machine.load_state_dict(self._loaded)
            self._loaded = None
        self.window = StepWindow(trainer, pl_module, lambda: self._begin(trainer), machine.abandon)
        self.window.watch()
        self._peers = PeerOpinion(trainer, pl_module, self.window, machine, self._values)
        self._undo = _check_gradients_with(trainer, lambda closure: self._checked(trainer, closure))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo()
        self._undo = lambda: None
        if self.window is not None:
            self.window.close()
        if self.machine is not None:
            self.machine.close()
        self.window = None

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"values": self._values.state_dict(), "counts": dict(self.counts), "digests": dict(self._digests)}
        return state | ({} if self.machine is None else {"machine": self.machine.state_dict()})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.load_state_dict(state_dict["values"])
        self.counts |= state_dict["counts"]
        self._digests = dict(state_dict.get("digests", {}))
        self._loaded = state_dict.get("machine")

    # A step.

    def _begin(self, trainer: Trainer) -> None:
        assert self.machine is not None
        self.machine.current_iteration = trainer.global_step
        self.machine.should_run_forward_backward()

    def _checked(self, trainer: Trainer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what an optimizer is to call instead of ``closure``: it returns with gradients that may be applied."""

        def checked() -> Any:
            window, machine = self.window, self.machine
            assert window is not None
            assert machine is not None
            window.begin_last()
            output = closure()
            if trainer.fit_loop._skip_backward or not window.micro_batches:
                window.clear()
                return output
            self._check_resumed_batches(trainer)
            self._validate(trainer)
            output = self._rerun(trainer, closure, output)
            while self._exclude(trainer):
                self._begin(trainer)
                output = self._replay(trainer, closure)
                self._validate(trainer)
                output = self._rerun(trainer, closure, output)
            return self._apply(trainer, output)

        return checked

    def _rerun(self, trainer: Trainer, closure: Callable[[], Any], output: Any) -> Any:
        """Collective. Run the step again as long as that is worth it; return what the last run returned."""
        assert self.window is not None
        assert self.machine is not None
        while self.machine.should_run_forward_backward():
            if self.machine.ranks.any(not self.window.can_be_replayed):
                log.warning("`training_step` changed its batch in place: this step can't be run again.")
            else:
                output = self._replay(trainer, closure)
            self._validate(trainer)
        return output

    def _replay(self, trainer: Trainer, closure: Callable[[], Any]) -> Any:
        assert self.window is not None
        getattr(trainer.strategy, "average_anew", lambda: None)()
        return self.window.replay(closure)

    def _exclude(self, trainer: Trainer) -> bool:
        """Collective. Remove ranks that compute wrongly each time, if there are any; whether the step is to be run again."""
        assert self.machine is not None
        assert self._peers is not None
        wrong = [f for f in self.machine.findings if f.diagnostic == RerunDiagnostic.PERSISTENT_ERROR]
        if not wrong or self._is_resumed:  # then it was the other device
            return False
        blamed = self._peers.blamed or self._peers.slots_of(f.rank for f in wrong if not f.shared)
        findings = self.machine.findings = with_culprits(self.machine.findings, blamed)
        if not (blamed and is_elastic(trainer) and self.on_persistent == "exclude"):
            return False
        self._report(trainer, findings, "exclude")
        exclude(trainer, blamed, f"it computed step {trainer.global_step + 1} wrongly, each time")
        self._peers.blamed = {}
        self.machine.abandon()
        return True

    def _check_resumed_batches(self, trainer: Trainer) -> None:
        """Collective after a resumption. Don't compare a step with another one's values: the loader may be elsewhere."""
        assert self.window is not None
        assert self.machine is not None
        self._is_resumed = self.machine.state == RerunState.RERUNNING_FROM_CHECKPOINT
        if not self._is_resumed:
            return
        batches = self._digests.get(str(trainer.global_rank))
        if self.machine.ranks.any(batches != digest([m.batch for m in self.window.micro_batches])):
            log.warning("The step that was rejected begins with other batches now: nothing is said about it.")
            self._is_resumed = False
            self.machine.abandon()
            self._begin(trainer)

    def _validate(self, trainer: Trainer) -> None:
        """Collective if parameters are sharded. Validate the pass that is over."""
        assert self.window is not None
        assert self.machine is not None
        losses = [m.loss for m in self.window.micro_batches if m.is_own and m.loss is not None]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else float(scaler.get_scale())
        norm = gradient_norm(trainer.lightning_module.parameters())
        self._values.validate(self.machine, losses, norm, scale=scale)

    def _apply(self, trainer: Trainer, output: Any) -> Any:
        """Do about the step what was found out about it; return what the optimizer is to see of it."""
        assert self.window is not None
        assert self.machine is not None
        checkpoint, leave, code = self.machine.should_checkpoint_and_exit()
        # After a resumption it is the other device that was wrong, if one was.
        action = "apply" if self._is_resumed and not leave else self._choose(self.machine.findings)
        self._is_resumed = False
        if self.machine.current_iteration in self._skipped:
            action = "skip_batch"
        if self.machine.findings:
            self._report(trainer, self.machine.findings, action)
        if code == EXIT_CODE_FAILED_ON_RESULT_VALIDATION and action in ("apply", *_SKIPS) and self._is_correct:
            leave = False  # another device says so, and it was asked for
            self.machine.abandon()
        if leave or action == "stop":
            if checkpoint:
                self._save(trainer)
            raise RerunExit(code or 17)
        if action in _SKIPS:
            output = self._skip(trainer, action)
        else:
            self._values.accept()
        self.window.clear()
        return output

    @property
    def _is_correct(self) -> bool:
        """Whether all that was rejected came out the same on another device."""
        assert self.machine is not None
        return all(finding.diagnostic == RerunDiagnostic.CORRECT_RESULT for finding in self.machine.findings)

    def _choose(self, findings: Sequence[Finding]) -> str:
        """Return what becomes of a step: the most careful of what its findings ask for."""
        wishes = [self._wish(finding) for finding in findings]
        return max(wishes, key=("apply", *_SKIPS, "stop").index, default="apply")

    def _wish(self, finding: Finding) -> str:
        if finding.diagnostic == RerunDiagnostic.TRANSIENT_ERROR:
            return "apply"  # what the rerun computed
        if finding.diagnostic == RerunDiagnostic.PERSISTENT_ERROR:
            return "stop"
        if finding.message == OVERFLOW:
            return "apply"  # which a GradScaler does not
        return self.on_correct if finding.fatal else self.on_spike

    def _skip(self, trainer: Trainer, action: str) -> Any:
        assert self.window is not None
        if action == "skip_batch":
            self.window.leave_no_trace()
        else:
            self.window.drop_gradients()
        # To Lightning and a GradScaler it is as if `training_step` had returned None; LBFGS needs a number.
        is_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers)
        return torch.zeros((), device=trainer.strategy.root_device) if is_lbfgs else None

    def _opinion(self, findings: Sequence[Finding]) -> Mapping[int, RerunDiagnostic] | None:
        """Collective. Ask another device, if there is one; else say what was asked to be assumed."""
        ask = self.second_opinion or self._peers
        opinion = None if ask is None else ask(findings)
        if opinion is None and self.without_opinion == "assume_correct":
            return {finding.rank: RerunDiagnostic.CORRECT_RESULT for finding in findings}
        return opinion

    # Reports.

    def _report(self, trainer: Trainer, findings: Sequence[Finding], action: str) -> None:
        assert self.window is not None
        batches = [micro_batch.arguments["batch_idx"] for micro_batch in self.window.micro_batches]
        events = getattr(trainer.strategy, "events", None)
        for finding in findings:
            verdict = "undecided" if finding.diagnostic is None else finding.diagnostic.value
            row = {
                "step": trainer.global_step + 1,
                "epoch": trainer.current_epoch,
                "batch_idx": batches[finding.sequence if finding.message.startswith(LOSS) else -1],
                "rank": finding.rank,
                "name": finding.message,
                "value": finding.value,
                "rerun_value": finding.rerun_value,
                "expected": finding.expected,
                "verdict": verdict,
                "action": "rerun" if finding.diagnostic == RerunDiagnostic.TRANSIENT_ERROR else action,
            }
            self.rows.append(row)
            self.counts["rejections"] += 1
            self.counts[verdict] = self.counts.get(verdict, 0) + 1
            if trainer.is_global_zero:
                log.warning("%s", describe(row))
                if events is not None:
                    events.emit("rejection", **row)
        metrics = {f"ft/{name}": float(count) for name, count in self.counts.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _save(self, trainer: Trainer) -> None:
        """Collective. Save a checkpoint from which another job runs this step first."""
        assert self.window is not None
        own = (str(trainer.global_rank), digest([m.batch for m in self.window.micro_batches]))
        assert self.machine is not None
        self._digests = dict(self.machine.ranks.gather(own))
        self.window.go_back()
        directory = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(directory, f"rerun-step={trainer.global_step}.ckpt")
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            log.warning(
                "Saved %s: resume from it on another device, to tell whether this one or the data is to blame.", path
            )


def describe(row: Mapping[str, Any]) -> str:
    """Return a line that says what was rejected, what it turned out to be, and what was done about it."""
    expected = f", expected {row['expected']}" if row["expected"] else ""
    again = "" if row["rerun_value"] is None else f", run again {row['rerun_value']:.6g}"
    return (
        f"Step {row['step']} (batch {row['batch_idx']} of epoch {row['epoch']}): {row['name']} on rank {row['rank']}:"
        f" {row['value']:.6g}{expected}{again}; {row['verdict'].replace('_', ' ')}, {row['action'].replace('_', ' ')}."
    )


class _TrainerRanks:
    """The ranks of a trainer, as those who decide together.

    Args:
        trainer: The trainer.

    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def rank(self) -> int:
        return self._trainer.global_rank

    def any(self, decision: bool) -> bool:
        if self._trainer.world_size == 1:
            return decision
        return self._trainer.strategy.reduce_boolean_decision(decision, all=False)

    def gather(self, value: Any) -> list[Any]:
        strategy: Any = self._trainer.strategy
        if self._trainer.world_size == 1:
            return [value]
        if hasattr(strategy, "gather_objects"):
            gathered = strategy.gather_objects(value)
            return [value] if gathered is None else list(gathered)
        values: list[Any] = [None] * self._trainer.world_size
        dist.all_gather_object(values, value)
        return values


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


def _check_gradients_with(trainer: Trainer, check: Callable[[Callable[[], Any]], Callable[[], Any]]) -> Callable[[], None]:
    """Have ``check`` wrap what runs the last pass of a step; return what undoes it."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "check_gradients_with"):
        strategy.check_gradients_with(check)
        return lambda: None
    before, optimizer_step = vars(strategy).get("optimizer_step"), strategy.optimizer_step

    def checked_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return optimizer_step(optimizer, check(closure), *args, **kwargs)

    def undo() -> None:
        vars(strategy).pop("optimizer_step", None)
        if before is not None:
            strategy.optimizer_step = before

    strategy.optimizer_step = checked_step
    return undo


def _is_not_finite(value: Any) -> bool:
    return not bool(torch.isfinite(value if isinstance(value, Tensor) else torch.tensor(value)).all())


def _name_device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return f"{device.type}:{trainer.local_rank if device.index is None else device.index}"


def _name_job(trainer: Trainer) -> str:
    """The same on all ranks, and another one in each job, where no launcher has given it a name."""
    own = os.environ.get("SLURM_JOBID") or os.environ.get("TORCHELASTIC_RUN_ID") or f"{platform.node()}-{os.getpid()}"
    return str(trainer.strategy.broadcast(own))
