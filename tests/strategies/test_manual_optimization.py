"""A rank is killed within batches that make no, one or several backward passes and optimizer steps."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_ft.testing import Fault, FaultPlan


def test_a_death_between_two_optimizers_costs_no_step_and_trains_nothing_twice(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="gradients_ready", step=4, occurrence=1),
            Fault(kind="kill", slot=0, point="before_optimizer_step", step=12, occurrence=1),
            Fault(kind="kill", slot=2, point="backward_early", step=22, occurrence=0),
            Fault(kind="kill", slot=1, point="before_optimizer_step", step=33, incarnation=1),
        ]
    )
    training = train(plan, model="stepping.Adversarial", ft={"min_replicas": 3}, dropout=0.2)
    training.assert_went_on(plan)
    steps = {event["step"]: event for event in training.of("step")}
    assert max(steps) == training.results[0]["global_step"] >= 40
    assert not training.of("accumulated")


def test_what_was_accumulated_by_hand_outlives_a_death_and_reaches_the_rank_that_returns(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="gradients_ready", step=1, occurrence=1),
            Fault(kind="kill", slot=0, point="train_batch_end", step=2),
            Fault(kind="kill", slot=2, point="forward", step=3, occurrence=1),
        ]
    )
    training = train(plan, model="stepping.Accumulating", ft={"min_replicas": 3}, max_epochs=3)
    training.assert_went_on(plan, max_epochs=3)
    assert training.of("accumulated")


@pytest.mark.parametrize("point", ["forward", "gradients_ready"])
def test_a_death_in_a_later_call_of_the_closure_leaves_one_step_and_one_history(
    point: str, train: Callable[..., Any]
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point=point, step=2, occurrence=1),
            Fault(kind="kill", slot=0, point=point, step=9, occurrence=2),
        ]
    )
    training = train(plan, model="stepping.LineSearching", ft={"min_replicas": 3})
    training.assert_went_on(plan)


def test_an_overflow_that_died_with_its_rank_skips_no_step_and_one_that_lived_skips_it_everywhere(
    train: Callable[..., Any],
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="gradients_ready", step=2)])
    training = train(plan, model="stepping.Overflowing", precision="16-mixed", ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert {result["callback_metrics"]["scale"] for result in training.results.values()} == {2.0**15}


def test_sparse_complex_and_double_gradients_outlive_a_death_and_reach_the_rank_that_returns(
    train: Callable[..., Any],
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="gradients_ready", step=4, rendezvous=True),
            Fault(kind="kill", slot=0, point="train_batch_start", step=8),
        ]
    )
    training = train(plan, model="stepping.OddKinds", ft={"min_replicas": 3})
    training.assert_went_on(plan)


def test_a_parameter_that_a_rank_does_not_use_is_an_error_with_its_name_unless_that_is_asked_for(
    train: Callable[..., Any],
) -> None:
    refused = train(name="refused", model="stepping.Idle", devices=2)
    assert refused.job.returncode == 1
    assert "Backward reached no gradient of idle.weight, idle.bias on at least one rank" in refused.job.stderr
    assert not refused.of("step")
    plan = FaultPlan([Fault(kind="kill", slot=0, point="gradients_ready", step=3)])
    allowed = train(plan, name="allowed", model="stepping.Idle", ft={"find_unused_parameters": True, "min_replicas": 2})
    allowed.assert_went_on(plan)


def test_ranks_that_make_different_numbers_of_backward_passes_are_told_and_nothing_is_mixed(
    train: Callable[..., Any],
) -> None:
    training = train(model="stepping.Lopsided", devices=2, num_samples=64)
    assert training.job.returncode == 1
    assert "rank 0 entered gradients of batch 5" in training.job.stderr
    assert "rank 1 entered gradients of batch 4" in training.job.stderr
    assert max(event["step"] for event in training.of("step")) == 4
