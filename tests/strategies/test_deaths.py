"""A rank is killed at every named point of a training, and the training goes on as if it had not been."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_ft.testing import Fault, FaultPlan, assert_reconfigurations

# Each list is one job; each point is a death. The slots alternate, so that the leader dies at half of the points.
IN_A_STEP = ["train_batch_start", "forward", "backward_early", "gradients_ready", "before_optimizer_step"]
AROUND = ["train_batch_end", "validation_start", "validation_batch", "validation_end", "train_epoch_end"]


def deaths(points: list[str], first_step: int, apart: int, offset: int, **more: Any) -> list[Fault]:
    """One death after the other; the incarnation counts the deaths of the same slot before."""
    incarnations = [itertools.count() for _ in range(3)]
    faults = []
    for number, point in enumerate(points):
        slot = (number + offset) % 2
        step = first_step + number * apart
        incarnation = next(incarnations[slot])
        faults.append(Fault(kind="kill", slot=slot, point=point, step=step, incarnation=incarnation, **more))
    return faults


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_death_in_a_step_costs_no_step_and_no_sample(
    offset: int, rendezvous: bool, train: Callable[..., Any]
) -> None:
    plan = FaultPlan(deaths(IN_A_STEP, 2, 3, offset, rendezvous=rendezvous))
    training = train(plan, ft={"min_replicas": 3, "max_restarts": 9}, dropout=0.2)
    training.assert_went_on(plan)
    alternating = [("death", "join")[n % 2] for n in range(2 * len(IN_A_STEP))]
    reasons = [event["reason"] for event in training.of("generation") if event["slot"] is None]
    assert reasons[: 1 + len(alternating)] == ["start", *alternating]
