"""Ranks of replicas of several ranks are killed in a training, which goes on as if they had not been."""

from collections.abc import Callable
from typing import Any

from lightning_ft.testing import Fault, FaultPlan


def test_a_death_takes_its_replica_out_of_the_step_and_both_ranks_come_back(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="backward_early", step=3)])
    training = train(plan, devices=4, ft={"shard_size": 2}, num_samples=192)
    training.assert_went_on(plan, num_samples=192)
    steps = {event["step"]: event["members"] for event in training.of("step")}
    assert (steps[3], steps[4], steps[max(steps)]) == ([0, 1, 2, 3], [2, 3], [2, 3, 0, 1])


def test_the_mates_of_the_dead_complete_the_same_step_as_one_replica(train: Callable[..., Any]) -> None:
    faults = [Fault(kind="kill", slot=slot, point="backward_early", step=3) for slot in (0, 3)]
    plan = FaultPlan(faults)
    training = train(plan, devices=4, ft={"shard_size": 2, "max_restarts": 0}, dropout=0.2)
    training.assert_went_on(plan)
    steps = {event["step"]: event["members"] for event in training.of("step")}
    assert (steps[3], steps[4]) == ([0, 1, 2, 3], [2, 1])
