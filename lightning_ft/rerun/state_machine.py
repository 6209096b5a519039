"""Validates the results of a step, and runs the step again when one is rejected, to find out why."""

import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_ft.elastic.checks import check_count
from lightning_ft.errors import ResultRejectedError
from lightning_ft.rerun.comparison import as_number, relative_difference
from lightning_ft.rerun.data_iterator import RerunDataIterator
from lightning_ft.rerun.error_injector import RerunErrorInjector
from lightning_ft.rerun.findings import Finding, SecondOpinion, after_resumption, diagnosed, next_move, of_culprits
from lightning_ft.rerun.large_values import LargeValues
from lightning_ft.rerun.passes import Compare, Passes, Validated
from lightning_ft.rerun.random_state import random_state, set_random_state
from lightning_ft.rerun.ranks import DefaultRanks, Ranks
from lightning_ft.rerun.states import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    RerunValidationStatus,
)
from lightning_ft.rerun.statistics import DeterminismStatistics, merged, table
from lightning_ft.rerun.suspicion import Suspicion
from lightning_ft.rerun.tracker import UNKNOWN_JOB, Tracker, read_iterations_to_skip

log = logging.getLogger(__name__)

_RUNNING = (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT)

Iterators = RerunDataIterator | Sequence[RerunDataIterator] | None


class RerunStateMachine:
    """Megatron's rerun state machine, for a loop of your own: what it computes is validated, and computed again if rejected.

    Method names, exit codes, and the tracker file's grammar are Megatron's. In short::

        machine = RerunStateMachine()
        while machine.should_run_forward_backward(data):  # once, or more often if something was rejected
            optimizer.zero_grad()
            loss = model(next(data))
            machine.validate_result(loss, torch.isnan, "loss is NaN")
            loss.backward()
        should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
        if should_checkpoint:
            save(..., machine.state_dict(data))
        if should_exit:
            sys.exit(exit_code)
        optimizer.step()

    A result that comes out differently the second time was a transient error, and training goes on with the second one.
    One that comes out the same is correct, or the device computes it wrongly every time. Somebody else tells which:
    ``second_opinion`` at once, if there is one. If not, and the value is fatal, the job saves a checkpoint and ends with
    code 16; resumed on another device it runs the step there, and says which. One that is not fatal is let pass.

    What a rerun must restore beside the random numbers (buffers, metrics, a GradScaler) is up to ``state_save_func``.

    Args:
        mode: Whether to validate; ``report_determinism_stats`` runs every step twice and reports how far results differ.
        state_save_func: Returns what a rerun needs, before a step.
        state_restore_func: Brings it back, before a rerun.
        error_injector: Pretends errors.
        result_rejected_tracker_filename: File in which rejected results are written down.
        ranks: The ranks that run a step together; default: those of torch.distributed, if it is initialized.
        second_opinion: Asks another device about values that this one computed twice.
        max_reruns: A result that is bad and different each time is run again at most so often; after that the device is
            taken for broken.
        stats_interval: Steps between two reports of determinism statistics.
        device: Of this rank, for the tracker file and to know it again.
        restores_random_state: Whether a rerun begins with the random numbers of the step; if not, the caller sees to it.
        job: Name of the job, the same on all its ranks; default: that of SLURM or torchrun, if there is one.

    Raises:
        ValueError: If an argument is not valid.
        RuntimeError: If the tracker file can't be opened.

    """

    def __init__(
        self,
        mode: RerunMode | str = RerunMode.VALIDATE_RESULTS,
        *,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | os.PathLike[str] | None = None,
        ranks: Ranks | None = None,
        second_opinion: SecondOpinion | None = None,
        max_reruns: int = 3,
        stats_interval: int = 100,
        device: str = "cpu",
        restores_random_state: bool = True,
        job: str | None = None,
    ) -> None:
        check_count("RerunStateMachine", "max_reruns", max_reruns, least=1)
        check_count("RerunStateMachine", "stats_interval", stats_interval, least=1)
        self.set_mode(mode)
        self.state = RerunState.NOT_RUNNING_YET
        self.current_iteration = 0
        """How many steps were begun; may be set before one."""
        self.ranks = DefaultRanks() if ranks is None else ranks
        self.second_opinion = second_opinion
        self.error_injector = RerunErrorInjector() if error_injector is None else error_injector
        self.findings: list[Finding] = []
        """What was rejected in the last step, on all ranks, and what it turned out to be; empty if nothing was."""
        self.stands_in_for: int | None = None
        """After a resumption: the rank whose inputs are run here; default: this rank's own."""
        self.statistics: dict[str, DeterminismStatistics] = {}
        self._save, self._restore = state_save_func, state_restore_func
        self._restores_random_state = restores_random_state
        self._max_reruns, self._stats_interval = max_reruns, stats_interval
        self._saved: Any = None
        self._passes = Passes()
        self._suspicion = Suspicion([platform.node(), device])
        self._large_values = LargeValues()
        self._tracker: Tracker | None = None
        if result_rejected_tracker_filename is not None:
            job = job or os.environ.get("SLURM_JOBID") or os.environ.get("TORCHELASTIC_RUN_ID") or UNKNOWN_JOB
            self._tracker = Tracker(result_rejected_tracker_filename, node=platform.node(), device=device, job=job)

    # Modes.

    def set_mode(self, mode: RerunMode | str) -> None:
        """Validate from now on as ``mode`` says; also by the name that Megatron's command line has, ``report_stats``."""
        aliases = {"report_stats": RerunMode.REPORT_DETERMINISM_STATS}
        names = [m.value for m in RerunMode]
        if not isinstance(mode, RerunMode) and mode not in (*names, *aliases):
            raise ValueError(f"`RerunStateMachine(mode={mode!r})` is not valid: expected one of {', '.join(names)}.")
        self._mode = mode if isinstance(mode, RerunMode) else RerunMode(aliases.get(mode, mode))

    def get_mode(self) -> RerunMode:
        """Return what validation does."""
        return self._mode

    # The loop.

    def should_run_forward_backward(self, data_iterator: Iterators = None) -> bool:
        """Collective. Whether to run the step: once, and again as long as that says something new about rejected results."""
        iterators = _as_list(data_iterator)
        if self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT:
            return self._begin_after_resumption(iterators)
        if self.state not in _RUNNING:
            return self._begin(iterators)
        if self._mode == RerunMode.DISABLED:
            return self._end()
        if self.state == RerunState.INITIAL_RUN:
            if self._mode == RerunMode.REPORT_DETERMINISM_STATS or self.ranks.any(self._passes.any_rejected):
                return self._rerun_in_place(iterators)
            return self._end()
        if self.state == RerunState.RERUNNING_FROM_CHECKPOINT:
            return self._decide_after_resumption()
        if self._mode == RerunMode.REPORT_DETERMINISM_STATS:
            self._record_statistics()
            return self._end()
        return self._decide(iterators)

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return whether to save a checkpoint, whether to exit, and with which code; before the optimizer step."""
        if self._mode != RerunMode.VALIDATE_RESULTS:
            return False, False, 0
        if self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT:
            return True, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE
        if self.state == RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT:
            return False, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE
        if self.state in (RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT):
            return False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION
        return False, False, 0

    def abandon(self) -> None:
        """Forget the step under way: an exception ended it, or it is begun again."""
        self.state = RerunState.NOT_RUNNING_YET
        self._clear()

    def give_up_rerun(self) -> None:
        """Say, alike on all ranks and in place of a rerun, that the step can't be run again."""
        self._passes.is_final = True

    @contextmanager
    def apart(self) -> Iterator[Passes]:
        """Record what is validated meanwhile in what this yields: it is of a step that is run for somebody else."""
        own, self._passes, state = self._passes, Passes(), self.state
        self.state = RerunState.RERUNNING_IN_PLACE
        try:
            yield self._passes
        finally:
            self._passes, self.state = own, state

    # Validation.

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
        *,
        expected: str = "",
        shared: bool = False,
        micro_batch: int | None = None,
    ) -> bool:
        """Validate one result of the step; return whether it was accepted.

        Args:
            result: A number, or a tensor of one element; anything else if ``comparison_func`` knows what to do with it.
            rejection_func: Whether the result is bad.
            message: What it is; the validations of a step are told apart by it and by their order.
            comparison_func: How far two results are apart; default: their relative difference.
            tolerance: How far they may be apart and still count as the same.
            fatal: Whether a bad result must not be applied.
            expected: What it should have been, for a reader.
            shared: Whether it is the same on all ranks by its nature.
            micro_batch: Of which micro-batch of the step it is, from 0; default: of the whole step.

        Raises:
            ResultRejectedError: If it is rejected and fatal, and the mode is ``disabled``.
            RuntimeError: If no step is under way.

        """
        injected = self._mode == RerunMode.VALIDATE_RESULTS and self.state == RerunState.INITIAL_RUN
        is_rejected = bool(rejection_func(result)) or (injected and self.error_injector.maybe_inject(self.ranks.rank))
        if self._mode == RerunMode.DISABLED:
            if is_rejected:
                self._track(RerunValidationStatus.RERUN_DISABLED, result, message)
                error = ResultRejectedError(message, str(result), self.current_iteration)
                if fatal:
                    raise error
                log.warning("%s", error)
            return not is_rejected
        if self.state not in _RUNNING:
            raise RuntimeError(
                f"`validate_result(message={message!r})` was called outside of a step: call it within"
                " `while machine.should_run_forward_backward(...)`."
            )
        result = result.detach().clone() if isinstance(result, torch.Tensor) else result
        compare = comparison_func or relative_difference
        validated = Validated(result, is_rejected, fatal, compare, tolerance, expected, shared, micro_batch)
        self._passes.add(message, validated)
        if is_rejected and self.state == RerunState.INITIAL_RUN:
            self._track(RerunValidationStatus.INITIAL_RUN, result, message)
        return not is_rejected

    def is_unexpectedly_large(
        self, result: Any, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Return whether a result is more than ``threshold`` times as large as is usual for those of the same context.

        What is usual follows the last ``num_samples`` results; large ones, NaN and infinities never become usual.

        Args:
            result: A number, or a tensor of one element.
            threshold: How many times; more than 1.
            context: Which results belong together.
            num_samples: How many are remembered.
            resample: Whether to begin anew.

        """
        remember = self.state == RerunState.INITIAL_RUN
        value = abs(as_number(result))
        return self._large_values.judge(value, threshold, context, num_samples, resample=resample, remember=remember)

    # Checkpoints.

    def state_dict(self, data_iterator: Iterators = None) -> dict[str, Any]:
        """Collective. Return the state: always of the same structure, plain data, useful with any number of ranks."""
        is_suspicious = self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
        suspicion = self._suspicion
        return {
            "mode": self._mode.value,
            "state": int(self.state if is_suspicious else RerunState.NOT_RUNNING_YET),
            "current_iteration": self.current_iteration,
            "findings": [finding.state_dict() for finding in self.findings] if is_suspicious else [],
            **(suspicion.collect(self.ranks, _as_list(data_iterator)) if is_suspicious else suspicion.none()),
            "baselines": self._large_values.state_dict(),
            "error_injector": self.error_injector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, perhaps in another number of ranks."""
        self._clear()
        self.current_iteration = state["current_iteration"]
        self.state = RerunState(state["state"])
        self.findings = [Finding.of_state(finding) for finding in state["findings"]]
        self._suspicion.load(state)
        self._large_values.load_state_dict(state["baselines"])
        self.error_injector.load_state_dict(state["error_injector"])

    @staticmethod
    def get_skipped_iterations_from_tracker_file(tracker_file_name: str | os.PathLike[str]) -> list[int]:
        """Return the iterations, counted from 1, in which the same rank failed again and again: their data is to blame."""
        return read_iterations_to_skip(tracker_file_name)

    def close(self) -> None:
        """Close the tracker file. May be called twice."""
        if self._tracker is not None:
            self._tracker.close()

    # Passes.

    def _begin(self, iterators: list[RerunDataIterator]) -> bool:
        self._clear()
        self.findings = []
        self.current_iteration += 1
        self.state = RerunState.INITIAL_RUN
        if self._mode != RerunMode.DISABLED:
            random = random_state() if self._restores_random_state else None
            self._saved = (random, self._save() if self._save is not None else None)
        for iterator in iterators:
            iterator.advance()
        return True

    def _begin_after_resumption(self, iterators: list[RerunDataIterator]) -> bool:
        self._suspicion.begin(self._runs_for, iterators)
        self._clear()
        self.state = RerunState.RERUNNING_FROM_CHECKPOINT
        return True

    def _rerun_in_place(self, iterators: list[RerunDataIterator]) -> bool:
        self._go_back(iterators)
        self._passes.begin_again()
        self.state = RerunState.RERUNNING_IN_PLACE
        return True

    def _go_back(self, iterators: list[RerunDataIterator]) -> None:
        """Have everything as it was when the step began."""
        random, user = self._saved
        if random is not None:
            set_random_state(random)
        if self._restore is not None:
            self._restore(user)
        for iterator in iterators:
            iterator.rewind()

    def _end(self) -> bool:
        self.state = RerunState.NOT_RUNNING_YET
        self.error_injector.forget()
        self._clear()
        return False

    def _clear(self) -> None:
        self._passes = Passes()
        self._saved = None

    # Verdicts.

    def _decide(self, iterators: list[RerunDataIterator]) -> bool:
        """Collective. Take in what a rerun in place says."""
        rank = self.ranks.rank
        own = self._passes.findings(rank, self._compare)
        everybody = [Finding.of_state(state) for row in self.ranks.gather([f.state_dict() for f in own]) for state in row]
        move = next_move(everybody)
        if move == "run_again" and self._passes.num_reruns <= self._max_reruns:
            return self._rerun_in_place(iterators)
        culprits = of_culprits(everybody)
        for finding in culprits:
            if finding.rank == rank and not self._passes.is_final:
                same = finding.is_reproduced
                status = RerunValidationStatus
                told = status.FIRST_RERUN_REPRODUCIBLE if same else status.FIRST_RERUN_NOT_REPRODUCIBLE
                self._track(told, finding.value, finding.message)
        if move == "run_again":  # it never settles
            broken = {f.rank: RerunDiagnostic.PERSISTENT_ERROR for f in culprits if f.fatal}
            self.findings = [replace(finding, diagnostic=broken.get(finding.rank)) for finding in culprits]
            return False
        asked = [finding for finding in culprits if finding.is_reproduced]
        opinion = self.second_opinion(asked) if asked and self.second_opinion is not None else None
        self.findings = diagnosed(culprits, opinion)
        if any(finding.fatal and finding.diagnostic is None for finding in self.findings):
            self._go_back(iterators)
            self.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
            return False
        return self._end()

    def _decide_after_resumption(self) -> bool:
        """Collective. Compare what another device computed with what is in the checkpoint."""
        answers = self._suspicion.answers(self.findings, self._runs_for, self._passes, self._compare, self._track)
        verdict, self.findings = after_resumption(self.findings, self.ranks.gather(answers))
        if verdict == "go_on":
            return self._end()
        if verdict == "elsewhere":
            self.state = RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
        return False

    @property
    def _runs_for(self) -> int:
        """The rank whose inputs are run after a resumption."""
        return self.ranks.rank if self.stands_in_for is None else self.stands_in_for

    def _compare(self, compare: Compare, first: Any, second: Any) -> float:
        return self.error_injector.maybe_miscompare(compare, first, second, self.state)

    def _record_statistics(self) -> None:
        for message, difference in self._passes.differences():
            self.statistics.setdefault(message, DeterminismStatistics()).record(difference)
        if self.current_iteration % self._stats_interval == 0:
            self.report_statistics()

    def report_statistics(self) -> str:
        """Collective. Log, on rank 0, how far results of all ranks differed between a step and its rerun; return that."""
        text = table(merged(self.ranks.gather(self.statistics)))
        if self.ranks.rank == 0:
            log.info("Relative differences between a step and its rerun, after %s steps:\n%s", self.current_iteration, text)
        return text

    def _track(self, status: RerunValidationStatus, result: Any, message: str) -> None:
        if self._tracker is not None:
            rank, iteration = self.ranks.rank, self.current_iteration
            self._tracker.write(rank=rank, iteration=iteration, status=status, result=result, message=message)


def _as_list(data_iterator: Iterators) -> list[RerunDataIterator]:
    if data_iterator is None:
        return []
    return [data_iterator] if isinstance(data_iterator, RerunDataIterator) else list(data_iterator)
