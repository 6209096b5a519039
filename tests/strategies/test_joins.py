"""A rank that was started again joins at any moment of the others' training, and may die in it."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_ft.events.audit import audit
from lightning_ft.testing import Fault, FaultPlan, assert_reconfigurations


def first_death(step: int = 2) -> Fault:
    return Fault(kind="kill", slot=1, point="train_batch_end", step=step)


def test_a_joiner_has_the_random_numbers_and_metrics_of_the_others(train: Callable[..., Any]) -> None:
    plan = FaultPlan([first_death()])
    training = train(plan, ft={"min_replicas": 3}, dropout=0.3, batch_norm=True)
    training.assert_went_on(plan)
    assert_reconfigurations(training.events, ["start", ("death", 1), ("join", 1)])
    (join,) = audit(training.events).joins
    assert (join.slot, join.incarnation) == (1, 1)
    assert join.step in (2, 3)  # whether the others heard of the death before they began the next step


def test_a_joiner_after_a_validation_sends_and_receives_buffers_when_the_others_do(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="validation_end", step=8)])
    training = train(plan, ft={"min_replicas": 3}, batch_norm=True)
    training.assert_went_on(plan)


@pytest.mark.parametrize(
    "point", ["setup", "fit_start", "train_start", "join_requested", "healed", "joined", "forward", "train_batch_end"]
)
def test_a_joiner_may_die_on_its_way(point: str, train: Callable[..., Any]) -> None:
    plan = FaultPlan([first_death(), Fault(kind="kill", slot=1, point=point, incarnation=1)])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert training.results[1]["incarnation"] == 2


def test_a_joiner_that_dies_as_only_some_know_that_it_is_in_does_not_part_them(train: Callable[..., Any]) -> None:
    plan = FaultPlan([first_death(), Fault(kind="kill", slot=1, point="generation", incarnation=1)])
    training = train(plan, ft={"min_replicas": 3}, callbacks=["LosesTouchInAdmission"])
    training.assert_went_on(plan)
    assert any(event["replayed"] for event in training.of("generation") if event["slot"] == 2)


@pytest.mark.parametrize("point", ["handing_out", "handed_out", "admitted"])
def test_the_leader_may_die_while_it_lets_somebody_in(point: str, train: Callable[..., Any]) -> None:
    plan = FaultPlan([first_death(), Fault(kind="kill", slot=0, point=point)])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert training.results[0]["incarnation"] == 1


@pytest.mark.parametrize("point", ["operation_failed", "generation", "leader"])
def test_a_rank_may_die_in_the_recovery_from_another_death(point: str, train: Callable[..., Any]) -> None:
    first = Fault(kind="kill", slot=0, point="forward", step=3)
    second = Fault(kind="kill", slot=1, point=point, step=2)  # it may be a step behind when the first one dies
    plan = FaultPlan([first, second])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert {death.slot for death in audit(training.events).deaths} == {0, 1}


def test_a_joiner_waits_until_the_others_have_validated(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="validation_batch", step=4)])
    training = train(plan, ft={"min_replicas": 3}, val_check_interval=0.5, num_validation_samples=96)
    training.assert_went_on(plan)


def test_a_joiner_waits_for_the_end_of_an_accumulation_window(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="train_batch_end", step=2, occurrence=1)])
    training = train(plan, ft={"min_replicas": 3}, accumulate=3, batch_size=2)
    training.assert_went_on(plan)


def test_a_death_in_the_last_step_of_an_epoch_is_made_good_in_that_epoch(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="backward_early", step=7, rendezvous=True)])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)


def test_ranks_that_die_with_workers_leave_no_sample_untrained(train: Callable[..., Any]) -> None:
    plan = FaultPlan([first_death(3), Fault(kind="kill", slot=0, point="forward", step=6)])
    training = train(plan, workers=2)
    training.assert_went_on(plan)


def test_too_few_replicas_end_the_job_and_leave_its_checkpoint(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="forward", step=6)])
    training = train(plan, ft={"min_replicas": 3, "max_restarts": 0})
    assert training.job.returncode == 1
    assert "3 needed" in training.job.stderr
    assert (training.directory / "steps" / "step=5.ckpt").exists()
