import gc
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ft.errors import ResultRejectedError
from lightning_ft.rerun.data_iterator import RerunDataIterator
from lightning_ft.rerun.error_injector import RerunErrorInjector
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.state_machine import RerunStateMachine
from lightning_ft.rerun.states import RerunDiagnostic, RerunMode, RerunState

NAN, INF = math.nan, math.inf
CORRECT, TRANSIENT, PERSISTENT = (
    RerunDiagnostic.CORRECT_RESULT,
    RerunDiagnostic.TRANSIENT_ERROR,
    RerunDiagnostic.PERSISTENT_ERROR,
)


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank = rank
        self._slots = slots
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values

    def any(self, decision: bool) -> bool:
        return any(self.gather(decision))


def in_ranks(function: Callable[[ThreadRanks], Any], count: int) -> list[Any]:
    slots, barrier = [None] * count, Barrier(count)
    gc.disable()  # one that lets another thread run while torch holds its generator's lock would be a deadlock
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda rank: function(ThreadRanks(rank, slots, barrier)), range(count)))
    finally:
        gc.enable()


def is_bad(value: Any) -> bool:
    return not math.isfinite(value)


def is_large(value: Any) -> bool:
    return abs(value) > 100


def run_step(machine: RerunStateMachine, *passes: Sequence[tuple[str, float, bool]]) -> tuple[int, tuple[bool, bool, int]]:
    """Run a step whose passes validate these values: (message, value, whether it is fatal)."""
    count = 0
    while machine.should_run_forward_backward():
        for message, value, fatal in passes[min(count, len(passes) - 1)]:
            machine.validate_result(value, is_bad if fatal else is_large, message, fatal=fatal)
        count += 1
        assert count < 20
    return count, machine.should_checkpoint_and_exit()


GO_ON = (False, False, 0)


def diagnostics(machine: RerunStateMachine) -> list[tuple[int, str, RerunDiagnostic | None]]:
    return [(finding.rank, finding.message, finding.diagnostic) for finding in machine.findings]


def test_a_step_without_rejections_runs_once() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("loss", 1.0, True)]) == (1, GO_ON)
    assert (machine.current_iteration, machine.findings, machine.state) == (1, [], RerunState.NOT_RUNNING_YET)


def test_a_value_that_comes_out_differently_was_transient_and_training_goes_on_also_if_fatal() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("loss", NAN, True)], [("loss", 1.0, True)]) == (2, GO_ON)
    assert diagnostics(machine) == [(0, "loss", TRANSIENT)]


def test_a_fatal_value_that_comes_out_the_same_ends_the_job_with_16_also_in_the_first_step() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("loss", NAN, True)]) == (2, (True, True, 16))
    assert machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT


def test_a_spike_that_comes_out_the_same_is_let_pass() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("loss", 500.0, False)]) == (2, GO_ON)
    assert machine.findings[0].is_reproduced


def test_a_spike_does_not_hide_a_fatal_value_of_the_same_step() -> None:
    assert run_step(RerunStateMachine(), [("spike", 500.0, False), ("gradient", NAN, True)])[1] == (True, True, 16)


def test_a_spike_of_one_rank_does_not_outvote_a_fatal_value_of_another() -> None:
    def train(ranks: ThreadRanks) -> Any:
        step = [("loss", NAN, True)] if ranks.rank == 0 else [("loss", 500.0, False)]
        return run_step(RerunStateMachine(ranks=ranks), step)[1]

    assert in_ranks(train, 3) == [(True, True, 16)] * 3


def test_a_spike_that_the_rerun_does_not_come_to_is_not_reproduced_and_training_goes_on() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("a", 500.0, False)], [("b", 1.0, False)]) == (2, GO_ON)
    assert diagnostics(machine) == [(0, "a", TRANSIENT)]


@pytest.mark.parametrize(("first", "second", "code"), [(INF, -INF, 17), (NAN, INF, 17), (NAN, NAN, 16), (INF, INF, 16)])
def test_what_is_not_finite_is_compared_like_any_value(first: float, second: float, code: int) -> None:
    values = [[("loss", value, True)] for value in (first, second) * 5]
    assert run_step(RerunStateMachine(), *values)[1][2] == code


def test_a_value_and_its_opposite_are_far_apart() -> None:
    machine = RerunStateMachine()
    assert run_step(machine, [("loss", 500.0, False)], [("loss", -500.0, False)])[1] == GO_ON
    assert diagnostics(machine) == [(0, "loss", TRANSIENT)]


def test_a_comparison_of_the_users_own_that_says_nan_has_not_found_the_same() -> None:
    machine = RerunStateMachine()
    while machine.should_run_forward_backward():
        machine.validate_result(500.0, is_large, "loss", comparison_func=lambda a, b: NAN, tolerance=1.0, fatal=False)
    assert diagnostics(machine) == [(0, "loss", TRANSIENT)]


def test_values_within_the_tolerance_are_the_same() -> None:
    for tolerance, expected in ((0.0, TRANSIENT), (0.01, None)):
        machine, values = RerunStateMachine(), iter((500.0, 501.0))
        while machine.should_run_forward_backward():
            machine.validate_result(torch.tensor(next(values)), is_large, "loss", tolerance=tolerance, fatal=False)
        assert diagnostics(machine) == [(0, "loss", expected)]


def test_a_fault_of_the_rerun_itself_is_not_applied_either() -> None:
    machine = RerunStateMachine()
    fine, bad, other = (
        [("a", 1.0, True), ("b", 1.0, True)],
        [("a", NAN, True), ("b", 1.0, True)],
        [("a", 1.0, True), ("b", INF, True)],
    )
    assert run_step(machine, bad, other, fine) == (3, GO_ON)
    assert diagnostics(machine) == [(0, "b", TRANSIENT)]


def test_a_device_that_computes_something_else_and_bad_each_time_is_broken() -> None:
    machine = RerunStateMachine(max_reruns=3)
    values = [[("loss", value, True)] for value in (NAN, INF, -INF, NAN, INF, -INF)]
    assert run_step(machine, *values) == (5, (False, True, 17))
    assert diagnostics(machine) == [(0, "loss", PERSISTENT)]


def test_the_culprit_is_named_and_not_who_sees_it_in_the_average() -> None:
    def train(ranks: ThreadRanks) -> Any:
        machine = RerunStateMachine(ranks=ranks, second_opinion=lambda findings: {1: PERSISTENT})
        while machine.should_run_forward_backward():
            machine.validate_result(NAN if ranks.rank == 1 else 1.0, is_bad, "loss")
            machine.validate_result(NAN, is_bad, "gradient norm", shared=True)
        return diagnostics(machine), machine.should_checkpoint_and_exit()

    assert in_ranks(train, 2) == [([(1, "loss", PERSISTENT)], GO_ON)] * 2


@pytest.mark.parametrize("diagnostic", [CORRECT, PERSISTENT])
def test_a_second_opinion_makes_the_checkpoint_needless(diagnostic: RerunDiagnostic) -> None:
    asked: list[Finding] = []

    def opinion(findings: Sequence[Finding]) -> Mapping[int, RerunDiagnostic]:
        asked.extend(findings)
        return {0: diagnostic}

    machine = RerunStateMachine(second_opinion=opinion)
    assert run_step(machine, [("loss", NAN, True)]) == (2, GO_ON)
    assert diagnostics(machine) == [(0, "loss", diagnostic)]
    assert [finding.message for finding in asked] == ["loss"]


def test_random_numbers_inputs_and_the_users_own_state_are_those_of_the_first_run() -> None:
    saved, restored = [], []
    data = RerunDataIterator([{"x": 1}, {"x": 2}, {"x": 3}])
    machine = RerunStateMachine(state_save_func=lambda: saved.append(1) or "user", state_restore_func=restored.append)
    runs: list[Any] = []
    while machine.should_run_forward_backward(data):
        batch = next(data), next(data)
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
        runs.append(([one.pop("x") for one in batch], drawn))
        machine.validate_result(500.0, is_large, "loss", fatal=False)
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert (saved, restored) == ([1], ["user"])
    assert machine.should_run_forward_backward([data])
    assert next(data) == {"x": 3}


def test_a_rerun_reads_no_more_than_the_first_run_did() -> None:
    data = RerunDataIterator(iter(range(5)))
    assert RerunDataIterator(data).__dict__ is data.__dict__
    assert next(data) == 0
    data.rewind()
    assert next(data) == 0
    with pytest.raises(RuntimeError, match="micro-batch 2 of a rerun of 1"):
        next(data)
    other = RerunDataIterator(iter(range(1, 5)))
    other.load_state_dict(data.state_dict())
    other.rewind()
    assert next(other) == 0
    other.advance()
    assert next(other) == 1


@pytest.mark.parametrize(
    ("elsewhere", "device", "code", "diagnostic"),
    [(NAN, "b", 17, CORRECT), (1.0, "b", 0, PERSISTENT), (INF, "b", 17, PERSISTENT), (NAN, "a", 16, None)],
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_resumed_job_tells_a_broken_device_from_a_wrong_value_with_any_number_of_ranks(
    elsewhere: float, device: str, code: int, diagnostic: RerunDiagnostic | None, num_ranks: int
) -> None:
    drawn: list[float] = []

    def first_job(ranks: ThreadRanks) -> Any:
        machine, data = RerunStateMachine(ranks=ranks, device="a"), RerunDataIterator([ranks.rank, 7])
        while machine.should_run_forward_backward(data):
            batch = next(data)
            drawn.append(float(torch.rand(())))
            machine.validate_result(NAN if batch == 1 else 1.0, is_bad, "loss")
        assert machine.should_checkpoint_and_exit() == (True, True, 16)
        return machine.state_dict(data)

    state = in_ranks(first_job, 2)[0]

    def second_job(ranks: ThreadRanks) -> Any:
        machine, data = RerunStateMachine(ranks=ranks, device=device), RerunDataIterator([5, 6])
        machine.load_state_dict(state)
        machine.stands_in_for = machine.findings[0].rank
        while machine.should_run_forward_backward(data):
            assert next(data) == 1
            machine.validate_result(elsewhere, is_bad, "loss")
        told = machine.findings[0].diagnostic, machine.should_checkpoint_and_exit()[2]
        assert machine.state_dict(data).keys() == state.keys()
        return told

    assert in_ranks(second_job, num_ranks) == [(diagnostic, code)] * num_ranks


def test_a_state_of_a_step_without_suspicion_begins_with_the_next_step() -> None:
    machine = RerunStateMachine()
    run_step(machine, [("loss", 1.0, True)])
    other = RerunStateMachine()
    other.load_state_dict(machine.state_dict())
    assert (other.state, other.current_iteration) == (RerunState.NOT_RUNNING_YET, 1)


def test_large_values_are_told_by_what_was_usual_lately() -> None:
    machine, flagged = RerunStateMachine(), []
    losses = [11.0 - 0.09 * min(i, 100) for i in range(300)]  # from 11 to 2
    for index, loss in enumerate([*losses, 30.0, 2.0, 30.0, 11.0]):
        while machine.should_run_forward_backward():
            if machine.is_unexpectedly_large(torch.tensor(loss), 5.0, "loss"):
                flagged.append(index)
    assert flagged == [300, 302, 303]
    with pytest.raises(ValueError, match="expected more than 1"):
        machine.is_unexpectedly_large(1.0, 1.0, "loss")


def test_a_mode_has_two_names_and_no_other() -> None:
    assert RerunStateMachine("report_stats").get_mode() == RerunMode.REPORT_DETERMINISM_STATS
    with pytest.raises(ValueError, match="expected one of disabled, validate_results, report_determinism_stats"):
        RerunStateMachine("strict")


def test_determinism_statistics_run_every_step_twice() -> None:
    machine = RerunStateMachine(RerunMode.REPORT_DETERMINISM_STATS, stats_interval=10)
    noise = iter(range(100))
    for _ in range(10):
        runs = 0
        while machine.should_run_forward_backward():
            machine.validate_result(1.0, is_bad, "same")
            machine.validate_result(1.0 + 1e-3 * (next(noise) % 2), is_bad, "noisy")
            runs += 1
        assert runs == 2
        assert machine.should_checkpoint_and_exit() == GO_ON
    lines = machine.report_statistics().splitlines()
    assert lines[0].split() == ["count", "different", "p50", "p90", "p99", "p99.9", "max"]
    assert lines[1].split() == ["same", "10", *"000000"]
    assert lines[2].split()[:3] == ["noisy", "10", "10"]
    assert float(lines[2].split()[-1]) == pytest.approx(1e-3, rel=0.01)


def test_without_reruns_a_fatal_value_is_an_error_and_a_spike_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    machine = RerunStateMachine("disabled")
    assert machine.should_run_forward_backward()
    assert not machine.validate_result(500.0, is_large, "loss is large", fatal=False)
    assert "loss is large (500.0)" in caplog.text
    with pytest.raises(ResultRejectedError, match="loss is NaN"):
        machine.validate_result(NAN, is_bad, "loss is NaN")
    assert not machine.should_run_forward_backward()


def test_a_validation_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside of a step"):
        RerunStateMachine().validate_result(1.0, is_bad, "loss")


@pytest.mark.parametrize(("kind", "code", "resumed"), [(TRANSIENT, 0, 0), (PERSISTENT, 16, 0), (CORRECT, 16, 17)])
def test_pretended_errors_come_out_as_what_they_pretend_to_be(kind: RerunDiagnostic, code: int, resumed: int) -> None:
    before = random.getstate()
    machine = RerunStateMachine(error_injector=RerunErrorInjector(3, kind.value), device="a")
    for _ in range(20):
        told = run_step(machine, [("loss", 1.0, True)])[1]
        if machine.findings:
            break
    assert random.getstate() == before
    assert told[2] == code
    if code:
        other = RerunStateMachine(error_injector=RerunErrorInjector(3, kind), device="b")
        other.load_state_dict(machine.state_dict())
        assert run_step(other, [("loss", 1.0, True)])[1][2] == resumed
        assert other.findings[0].diagnostic == kind


def test_the_tracker_file_tells_what_to_skip(tmp_path: Path) -> None:
    file = tmp_path / "tracker.txt"
    machine = RerunStateMachine(result_rejected_tracker_filename=file, device="cuda:0", job="first")
    run_step(machine, [("loss", 1.0, True)])
    assert run_step(machine, [("it's\nloss", NAN, True)])[1][2] == 16
    machine.close()
    machine.close()
    assert RerunStateMachine.get_skipped_iterations_from_tracker_file(file) == []
    other = RerunStateMachine(result_rejected_tracker_filename=file, device="cuda:1", job="second")
    other.load_state_dict(machine.state_dict())
    assert run_step(other, [("it's\nloss", NAN, True)])[1][2] == 17
    other.close()
    statuses = [line.split("status=")[1].split()[0] for line in file.read_text().splitlines()]
    assert statuses == ["initial_run", "first_rerun_reproducible", "second_rerun_reproducible"]
    assert "jobID=first rank=0 iteration=2 " in file.read_text()
    assert RerunStateMachine.get_skipped_iterations_from_tracker_file(file) == [2]
    with pytest.raises(RuntimeError, match="can't be opened"):
        RerunStateMachine(result_rejected_tracker_filename=tmp_path)
