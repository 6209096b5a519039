"""Ranks of replicas of several ranks are killed in a training, which goes on as if they had not been."""

from collections.abc import Callable
from typing import Any

from lightning_ft.testing import Fault, FaultPlan


def test_a_death_takes_its_replica_out_of_the_step_and_both_ranks_come_back(train: Callable[..., Any]) -> None:
    # Of either replica, leading or not; `min_replicas` makes the others wait, so that each death finds all alive.
    points = ("backward_early", "validation_batch", "gradients_ready", "save_checkpoint")
    faults = [
        Fault(kind="kill", slot=slot, point=point, step=step, incarnation=incarnation)
        for point, slot, step, incarnation in zip(points, (1, 2, 0, 3), (3, 6, 8, 10), (0, 0, 1, 1), strict=True)
    ]
    plan = FaultPlan(faults)
    options = {"shard_size": 2, "min_replicas": 2}
    training = train(plan, devices=4, ft=options, dropout=0.2, val_check_interval=0.5, clip=1.0, timeout=120.0)
    training.assert_went_on(plan)
    steps = {event["step"]: event["members"] for event in training.of("step")}
    assert (steps[3], steps[4], steps[5]) == ([0, 1, 2, 3], [2, 3], [2, 3, 0, 1])


def test_the_mates_of_the_dead_go_on_as_one_replica_in_the_same_step_or_validation(train: Callable[..., Any]) -> None:
    # Three times, the others being back each time; the third time gradients are averaged already, in step 10.
    faults = [Fault(kind="kill", slot=slot, point="backward_early", step=3) for slot in (0, 3)]
    faults += [
        Fault(kind="kill", slot=slot, point="validation_batch", step=6, incarnation=incarnation)
        for slot, incarnation in ((0, 1), (1, 0))
    ]
    plan = FaultPlan(faults)
    options: dict[str, Any] = {"ft": {"shard_size": 2, "min_replicas": 2}, "callbacks": ["DiesOnceReduced"]}
    training = train(plan, devices=4, dropout=0.2, batch_norm=True, **options)
    training.assert_went_on(plan)
    steps = {event["step"]: event["members"] for event in training.of("step")}
    assert (steps[3], steps[4], steps[5]) == ([0, 1, 2, 3], [2, 1], [2, 1, 0, 3])
    assert (steps[7], steps[8], steps[9]) == ([2, 1, 0, 3], [2, 3], [2, 3, 0, 1])
    assert (steps[10], steps[11]) == ([2, 3, 0, 1], [2, 1])
