"""What other replicas say of a value that a rank computed twice: real processes, and the verdict of each case."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.loops.peer_opinion import Heard, judge, judged_by, with_culprits
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.states import RerunDiagnostic
from lightning_ft.testing import (
    assert_every_ticket_once,
    assert_steps_contiguous,
    assert_weights_equal,
    run_job,
    run_without_supervisor,
)

JOB = Path(__file__).parent / "jobs" / "second_opinion.py"
CORRECT, PERSISTENT = RerunDiagnostic.CORRECT_RESULT, RerunDiagnostic.PERSISTENT_ERROR


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result_*.json"))]


def test_data_is_told_from_ranks_that_compute_wrongly_which_are_excluded_within_the_step(tmp_path):
    options = {"strategy": "FTStrategy", "gradient": [2, 4], "loss": [1, 7], "memory": [0, 10]}
    job = run_job(JOB, [json.dumps(options)], num_slots=3, directory=tmp_path, timeout=240.0)
    job.check()
    assert_every_ticket_once(job.events)  # also those that the excluded ones had in the step
    assert_steps_contiguous(job.events)
    rows = [(e["step"], e["name"], e["verdict"], e["action"]) for e in job.events if e["event"] == "rejection"]
    assert list(dict.fromkeys(rows)) == [  # both batches of step 8 are wrong
        (1, "loss", "correct_result", "skip_batch"),
        (5, "own gradient norm", "persistent_error", "exclude"),
        (8, "loss", "persistent_error", "exclude"),
        (11, "parameter norm is unexpectedly large", "persistent_error", "exclude"),
    ]
    excluded = {2: 5, 1: 8, 0: 11}
    reasons = {e["slot"]: e["how"] for e in job.events if e["event"] == "exit" and "excluded" in e["how"]}
    assert reasons == {slot: f"excluded: it computed step {step} wrongly, each time" for slot, step in excluded.items()}
    for slot, step in excluded.items():
        before, now = ([e for e in job.events if e["event"] == "step" and e["step"] == n] for n in (step - 1, step))
        assert all(slot in e["members"] and e["tickets"][str(slot)] for e in before)
        assert not any(slot in e["members"] or e["tickets"].get(str(slot)) for e in now)
    ended = results(tmp_path)
    assert all(result["finite"] and math.isfinite(result["loss"]) for result in ended)
    if len(ended) > 1:
        assert_weights_equal(*(result["fingerprint"] for result in ended))


def test_a_replica_of_several_ranks_is_judged_by_another_one_as_a_whole(tmp_path):
    options = {"strategy": "sharded", "gradient": [2, 4], "loss": [1, 7]}
    job = run_job(JOB, [json.dumps(options)], num_slots=4, directory=tmp_path, timeout=240.0)
    job.check()
    assert_every_ticket_once(job.events)
    assert_steps_contiguous(job.events)
    told = [(e["step"], e["of_slot"], e["name"], e["verdict"]) for e in job.events if e["event"] == "rejection"]
    assert list(dict.fromkeys(told)) == [
        (5, 2, "gradient norm", "persistent_error"),
        (5, 3, "gradient norm", "persistent_error"),  # who shares a gradient with it
        (8, 1, "loss", "persistent_error"),
        (10, 1, "loss", "correct_result"),
    ]
    excluded = {e["slot"] for e in job.events if e["event"] == "exit" and "excluded" in e["how"]}
    assert excluded == {1, 2, 3}
    ended = results(tmp_path)
    assert all(result["finite"] and math.isfinite(result["loss"]) for result in ended)
    assert_weights_equal(*(result["fingerprint"] for result in ended))


def test_who_is_judged_by_whom_holds_the_same_shard_in_another_replica() -> None:
    assert judged_by({0: (0, 0), 3: (0, 3), 5: (0, 5)}) == {0: 5, 3: 0, 5: 3}
    places = {0: (0, 0), 1: (1, 0), 2: (0, 2), 3: (1, 2), 6: (0, 5), 5: (1, 5)}
    assert judged_by(places) == {0: 6, 1: 5, 2: 0, 3: 1, 6: 2, 5: 3}


def finding(rank: int, message: str = "loss", shared: bool = False) -> Finding:
    return Finding(rank, message, 0, math.nan, fatal=True, shared=shared, is_reproduced=True)


def heard(of: int, same: dict[int, bool] | None = None, norm: float = 1.0, own_norm: float = 1.0) -> Heard:
    return Heard(of, same or {}, norm, own_norm)


SLOTS = {0: 0, 1: 3, 2: 5}


def test_a_value_that_another_rank_computes_too_is_correct_and_one_that_it_does_not_is_not():
    answers = {0: heard(5, {1: False}), 3: heard(0, {0: True}), 5: heard(3)}
    verdicts = judge([finding(0), finding(2)], SLOTS, answers)
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({0: CORRECT, 2: PERSISTENT}, (5,))
    answers = {0: heard(5), 3: heard(0, {0: True, 1: False}), 5: heard(3)}
    verdicts = judge([finding(0), finding(0, "mine")], SLOTS, answers)  # the worst of its values counts
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({0: PERSISTENT}, (0,))
    verdicts = judge([finding(0)], SLOTS, {0: heard(5), 3: heard(0), 5: heard(3)})  # elsewhere it did not come to that
    assert verdicts is not None
    assert verdicts.blamed == (0,)


def test_who_is_gone_is_to_blame_and_who_lost_its_judge_is_asked_about_again():
    verdicts = judge([finding(2)], SLOTS, {0: heard(5), 3: heard(0)})
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({2: PERSISTENT}, (5,))
    assert judge([finding(0)], SLOTS, {0: heard(5), 5: heard(3)}) is None
    shared = finding(0, "gradient norm", shared=True)
    verdicts = judge([shared], SLOTS, {0: heard(5), 3: heard(0)})
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({0: PERSISTENT}, (5,))  # whose gradient may have been it


@pytest.mark.parametrize("bad", [math.nan, math.inf, 50.0])
def test_a_bad_average_is_traced_to_the_gradient_that_comes_out_otherwise_elsewhere(bad):
    shared = finding(0, "gradient norm", shared=True)
    data = {0: heard(5), 3: heard(0), 5: heard(3, norm=bad)}
    data[3] = heard(0, own_norm=bad)
    verdicts = judge([shared], SLOTS, data)  # slot 3's batch is bad everywhere
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({0: CORRECT}, ())
    # Slot 3 makes every gradient bad: its own, and that of slot 0, which it runs.
    device = {0: heard(5), 3: heard(0, norm=bad, own_norm=bad), 5: heard(3)}
    verdicts = judge([shared], SLOTS, device)
    assert verdicts is not None
    assert (verdicts.of_rank, verdicts.blamed) == ({0: PERSISTENT}, (3,))
    told = with_culprits([replace(shared, diagnostic=PERSISTENT)], {3: 1})
    assert [(finding.rank, finding.diagnostic) for finding in told] == [(1, PERSISTENT)]


def test_under_ddp_a_rank_that_computes_wrongly_ends_the_job_with_code_17(tmp_path):
    options = {"strategy": "ddp", "loss": [1, 4]}
    job = run_without_supervisor(JOB, [json.dumps(options)], num_ranks=3, directory=tmp_path)
    assert job.returncode == 17
    assert "loss on rank 1: nan, expected a finite number, run again nan; persistent error, stop." in job.stderr
    assert "nan; correct result, skip batch." in job.stderr
