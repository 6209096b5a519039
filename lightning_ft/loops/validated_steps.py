"""Optimizer steps that are validated before they are applied, and run again when a value is not what it should be."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import LBFGS

from lightning_ft.loops.checked_gradients import check_gradients_with
from lightning_ft.loops.measured_pass import are_finite, measure_parameters, measure_pass
from lightning_ft.loops.own_gradient import OwnGradient
from lightning_ft.loops.peer_opinion import PeerOpinion, with_culprits
from lightning_ft.loops.rejections import Rejections
from lightning_ft.loops.rerun_checkpoint import RerunCheckpoint
from lightning_ft.loops.rolling_replay import ReplayOptions, RollingReplay
from lightning_ft.loops.window import StepWindow
from lightning_ft.rerun.exit import RerunExit
from lightning_ft.rerun.findings import Finding, SecondOpinion
from lightning_ft.rerun.policy import SKIPS, Policy
from lightning_ft.rerun.state_machine import RerunStateMachine
from lightning_ft.rerun.states import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, RerunDiagnostic, RerunState
from lightning_ft.rerun.step_values import Measured, StepValidation
from lightning_ft.trainer.slots import exclude, is_elastic

log = logging.getLogger(__name__)


class ValidatedSteps:
    """The steps of one fit.

    Args:
        trainer: The trainer, in a fit with automatic optimization.
        pl_module: Its module.
        machine: Decides what is run again.
        values: Tells what losses and gradients are usual.
        policy: What becomes of steps with rejected values.
        rejections: Where these are reported.
        checkpoint: Saves those that another device is to tell about.
        skipped: Steps, counted from 1, that are left out.
        validates_parameters: Whether the parameters that steps begin with are validated, too.
        replay: How far back, and when, earlier steps are run again; None: never.

    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        machine: RerunStateMachine,
        values: StepValidation,
        policy: Policy,
        rejections: Rejections,
        checkpoint: RerunCheckpoint,
        skipped: Collection[int],
        validates_parameters: bool,
        replay: ReplayOptions | None,
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._machine = machine
        self._values = values
        self._policy = policy
        self._rejections = rejections
        self._checkpoint = checkpoint
        self._skipped = frozenset(skipped)
        self._validates_parameters = validates_parameters
        self._is_resumed = False
        self.second_opinion: SecondOpinion | None = None
        """Asks another device in place of the other replicas."""
        machine.second_opinion = self._opinion
        self.window = StepWindow(trainer, pl_module, self._begin, machine.abandon)
        self._own_gradient = OwnGradient(trainer, pl_module) if trainer.num_devices * trainer.num_nodes > 1 else None
        self._peers = PeerOpinion(
            trainer, pl_module, self.window, machine, values, self._own_gradient, self._measure_parameters
        )
        self._rolling: RollingReplay | None = None
        if replay is not None:
            self._rolling = RollingReplay(
                trainer, pl_module, self.window, self._own_gradient, replay, values.tolerance, rejections.replays
            )
        self._measured: Sequence[Measured] = ()
        self._found: dict[str, Any] | None = None
        self.window.watch()
        self._undo = check_gradients_with(trainer, self._checked)

    def close(self) -> None:
        """Leave the trainer as it was. May be called twice."""
        self._undo()
        self._undo = lambda: None
        self.window.close()
        if self._own_gradient is not None:
            self._own_gradient.close()
        if self._rolling is not None:
            self._rolling.close()

    def end_epoch(self) -> None:
        """Note how the training stands, for what is run again after its end."""
        if self._rolling is not None:
            self._rolling.end_epoch()

    def end_training(self) -> None:
        """Collective. Validate what the last step left, and run steps again that are still to be.

        Raises:
            RerunExit: If the parameters are not finite.

        """
        self._validate_end()
        if self._rolling is not None:
            with self._machine.apart():
                self._rolling.end_training()

    def validate(
        self,
        name: str,
        value: Any,
        reject: Callable[[Any], Any] | None,
        compare: Callable[[Any, Any], float] | None,
        tolerance: float,
        fatal: bool,
    ) -> bool:
        """Validate a value of the module's own; return whether it was accepted, or need not be validated."""
        running = self.window.running
        if running is None or not running.is_own:
            return True  # outside of `training_step`, or of a batch that does not count
        where = self.window.index(running)
        return self._machine.validate_result(
            value, reject or _is_not_finite, name, compare, tolerance, fatal, micro_batch=where
        )

    def _begin(self) -> None:
        if self._rolling is not None and not self.window.micro_batches:
            self._rolling.begin_step()
        self._machine.current_iteration = self._trainer.global_step
        self._machine.should_run_forward_backward()

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what an optimizer is to call instead of ``closure``: it returns with gradients that may be applied."""
        if self._own_gradient is not None:
            closure = self._own_gradient.measuring(closure)

        def checked() -> Any:
            self.window.begin_last()
            output = closure()
            if self._trainer.fit_loop._skip_backward or not self.window.micro_batches:
                self.window.clear()
                return output
            if self._machine.current_iteration in self._skipped:
                return self._leave_out()
            self._begin_resumed()
            self._validate()
            output = self._rerun(closure, output)
            self._search()
            while self._exclude():
                self._begin()
                output = self._replay(closure)
                self._validate()
                output = self._rerun(closure, output)
            return self._apply(output)

        return checked

    def _leave_out(self) -> Any:
        log.info("Step %s is left out: the same rank failed in it in several jobs.", self._machine.current_iteration)
        output = self._skip("skip_batch")
        self._machine.abandon()
        self._measured = ()
        self._keep(is_applied=False)
        return output

    def _begin_resumed(self) -> None:
        """Collective after a resumption. Don't compare a step with another one's values."""
        self._is_resumed = self._machine.state == RerunState.RERUNNING_FROM_CHECKPOINT
        if self._is_resumed and not self._checkpoint.is_same_step(self._machine.ranks, self.window):
            log.warning("The step that was rejected begins with other batches now: nothing is said about it.")
            self._is_resumed = False
            self._machine.abandon()
            self._begin()

    def _validate(self) -> None:
        """Collective if parameters are sharded. Validate the pass that is over."""
        micro_batches = self.window.micro_batches
        is_own = micro_batches[-1].is_own and not self.window.has_base
        own_norm = None if self._own_gradient is None or not is_own else self._own_gradient.norm
        self._measured = measure_pass(self._trainer, self._pl_module, micro_batches, own_norm)
        self._values.validate(self._machine, [*self._measure_parameters(), *self._measured])

    def _measure_parameters(self) -> list[Measured]:
        """Collective if parameters are sharded. Return what is validated of those that the step begins with."""
        return measure_parameters(self._pl_module) if self._validates_parameters else []

    def _validate_end(self) -> None:
        if self._validates_parameters and self._machine.ranks.any(not are_finite(self._pl_module)):
            log.error("The parameters are not finite after the last step, %s.", self._trainer.global_step)
            raise RerunExit(EXIT_CODE_FAILED_ON_RESULT_VALIDATION)

    def _rerun(self, closure: Callable[[], Any], output: Any) -> Any:
        """Collective. Run the step again as long as that is worth it; return what the last run returned."""
        while self._machine.should_run_forward_backward():
            if self._machine.ranks.any(not self.window.can_be_replayed):
                log.warning("`training_step` changed its batch in place: this step can't be run again.")
                self._machine.give_up_rerun()
            else:
                output = self._replay(closure)
                self._validate()
        return output

    def _replay(self, closure: Callable[[], Any]) -> Any:
        getattr(self._trainer.strategy, "average_anew", lambda: None)()
        return self.window.replay(closure)

    def _search(self) -> None:
        """Collective. Look for the cause of what came out the same again in the steps before."""
        if self._rolling is None or not any(finding.is_reproduced for finding in self._machine.findings):
            return
        with self._machine.apart():
            self._found = self._rolling.search(self._measured)

    def _keep(self, *, is_applied: bool) -> None:
        """Collective. Let later steps look back to this one, which is decided and not yet applied."""
        if self._rolling is not None:
            with self._machine.apart():
                self._rolling.end_step(self._measured, is_applied=is_applied)
        self.window.clear()

    def _exclude(self) -> bool:
        """Collective. Remove ranks that compute wrongly each time, if there are any; whether the step is to be run again."""
        machine = self._machine
        wrong = [f for f in machine.findings if f.diagnostic == RerunDiagnostic.PERSISTENT_ERROR]
        if not wrong or self._is_resumed:  # then it was the other device
            return False
        blamed = self._peers.blamed or self._peers.slots_of(f.rank for f in wrong if not f.shared)
        machine.findings = with_culprits(machine.findings, blamed)
        if not (blamed and is_elastic(self._trainer) and self._policy.on_persistent == "exclude"):
            return False
        self._report("exclude")
        exclude(self._trainer, blamed, f"it computed step {self._trainer.global_step + 1} wrongly, each time")
        self._peers.blamed = {}
        machine.abandon()
        return True

    def _apply(self, output: Any) -> Any:
        """Do about the step what was found out about it; return what the optimizer is to see of it."""
        machine = self._machine
        checkpoint, leave, code = machine.should_checkpoint_and_exit()
        # After a resumption it is the other device that was wrong, if one was.
        action = "apply" if self._is_resumed and not leave else self._policy.action(machine.findings)
        self._is_resumed = False
        if code == EXIT_CODE_FAILED_ON_RESULT_VALIDATION and action != "stop" and self._is_correct:
            leave = False  # another device says so, and it was asked for
        if machine.findings:
            self._report("checkpoint" if leave and checkpoint else "stop" if leave else action)
        if leave or action == "stop":
            if checkpoint:
                self._checkpoint.save(self._trainer, machine.ranks, self.window)
            raise RerunExit(code or EXIT_CODE_FAILED_ON_RESULT_VALIDATION)
        if code:
            machine.abandon()
        if action in SKIPS:
            output = self._skip(action)
        else:
            self._values.accept()
        self._keep(is_applied=action not in SKIPS)
        return output

    @property
    def _is_correct(self) -> bool:
        """Whether all that was rejected came out the same on another device."""
        return all(finding.diagnostic == RerunDiagnostic.CORRECT_RESULT for finding in self._machine.findings)

    def _skip(self, action: str) -> Any:
        if action == "skip_batch":
            self.window.leave_no_trace()
        else:
            self.window.drop_gradients()
        # To Lightning and a GradScaler it is as if `training_step` had returned None; LBFGS needs a number.
        is_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in self._trainer.optimizers)
        return torch.zeros((), device=self._trainer.strategy.root_device) if is_lbfgs else None

    def _report(self, action: str) -> None:
        findings, found, self._found = self._machine.findings, self._found, None
        self._rejections.report(self._trainer, findings, self.window.micro_batches, action, found)

    def _opinion(self, findings: Sequence[Finding]) -> Mapping[int, RerunDiagnostic] | None:
        """Collective. Ask another device, if there is one; else say what was asked to be assumed."""
        opinion = (self.second_opinion or self._peers)(findings)
        if opinion is None and self._policy.without_opinion == "assume_correct":
            return {finding.rank: RerunDiagnostic.CORRECT_RESULT for finding in findings}
        return opinion


def _is_not_finite(value: Any) -> bool:
    return not bool(torch.isfinite(value if isinstance(value, Tensor) else torch.tensor(value)).all())
