"""How a job ends when user code raises or exits, and how it ends by itself."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_ft.testing import Fault, FaultPlan, assert_used_up


def raised(slot: int, step: int, **more: Any) -> Fault:
    return Fault(kind="raise", slot=slot, point="forward", step=step, error="ValueError", message="not today", **more)


def test_an_exception_of_one_rank_after_progress_is_a_death_like_any_other(train: Callable[..., Any]) -> None:
    plan = FaultPlan([raised(1, 3)])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert training.job.stderr.count("ValueError: not today") >= 1


def test_an_exception_of_all_ranks_ends_the_job_with_its_traceback(train: Callable[..., Any]) -> None:
    plan = FaultPlan([raised(slot, 3, rendezvous=True) for slot in range(3)])
    training = train(plan)
    assert_used_up(plan, training.events)
    assert training.job.returncode == 1
    assert "ValueError: not today" in training.job.stderr
    assert "so did every other member" in training.job.stderr


def test_an_exception_before_the_first_step_ends_the_job(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="raise", slot=2, point="train_start", error="KeyError", message="typo")])
    training = train(plan)
    assert training.job.returncode == 1
    assert "raised KeyError before the first step" in training.job.stderr


def test_an_exit_code_of_all_ranks_is_the_job_s(train: Callable[..., Any]) -> None:
    faults = [
        Fault(kind="raise", slot=slot, point="train_batch_end", step=3, error="SystemExit", code=7, rendezvous=True)
        for slot in range(3)
    ]
    plan = FaultPlan(faults)
    training = train(plan)
    assert_used_up(plan, training.events)
    assert training.job.returncode == 7


@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_ranks_that_die_again_and_again_stay_out(kind: str, train: Callable[..., Any]) -> None:
    faults = [Fault(kind=kind, slot=1, point="forward", step=2, incarnation=n, code=3) for n in range(2)]
    plan = FaultPlan(faults)
    training = train(plan, ft={"max_restarts": 1}, max_epochs=6, callbacks=["pacing.WaitsForFaults"])
    training.assert_went_on(plan, max_epochs=6)
    assert set(training.results) == {0, 2}


def test_all_trainer_calls_run_one_after_the_other(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="forward", step=2)])
    training = train(plan, ft={"min_replicas": 3}, calls=["fit", "validate", "test", "predict"])
    training.assert_went_on(plan)
    tested = [result["test"] for result in training.results.values()]
    assert all(result == tested[0] for result in tested)
    predicted = [index for result in training.results.values() for index in result["predict"]]
    assert sorted(set(predicted)) == list(range(24))


@pytest.mark.parametrize(("slot", "code"), [(0, 128 + 9), (1, 0)])
def test_what_rank_0_had_to_do_after_the_last_call_is_not_lost_in_silence(
    slot: int, code: int, train: Callable[..., Any]
) -> None:
    training = train(devices=2, killed_after_calls=slot)
    assert training.job.returncode == code
    assert set(training.results) == {1 - slot}
    told = "Rank 0 died after the last Trainer call" if code else "died (SIGKILL) after its Trainer call"
    assert told in training.job.stderr


@pytest.mark.parametrize("point", ["test_batch", "predict_batch"])
def test_a_death_in_an_evaluation_is_survived_by_the_others(point: str, train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point=point)])
    training = train(plan, calls=["fit", point.removesuffix("_batch")])
    training.job.check()
    assert_used_up(plan, training.events)
    assert set(training.results) == {0, 2}


def test_the_strategy_is_known_by_its_name(train: Callable[..., Any]) -> None:
    training = train(strategy="ft", devices=2)
    training.job.check()
    training.assert_ranks_agree()
