"""Collectives whose backward pass is a collective too: the same numbers as under ``ddp``, and ranks that die between."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_ft.testing import Fault, FaultPlan, assert_weights_equal


@pytest.mark.parametrize("model", ["Contrastive", "LateSum"])
def test_gradients_that_flow_through_collectives_equal_those_of_ddp(
    model: str, train: Callable[..., Any], train_with_ddp: Callable[..., Any]
) -> None:
    ours = train(devices=2, model=model, max_epochs=1)
    ours.job.check()
    theirs = train_with_ddp(model=model, max_epochs=1)
    theirs.job.check()
    assert_weights_equal(ours.results[0]["fingerprint"], theirs.results[0]["fingerprint"])
    assert len([event for event in ours.of("generation") if event["slot"] == 0]) == (2 if model == "LateSum" else 1)


@pytest.mark.parametrize("model", ["Contrastive", "LateSum"])
def test_ranks_may_die_on_either_side_of_a_collective_inside_backward(model: str, train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="forward", step=1),
            Fault(kind="kill", slot=1, point="backward_early", step=3, rendezvous=True),
            Fault(kind="kill", slot=2, point="gradients_ready", step=6, rendezvous=True),
        ]
    )
    training = train(plan, ft={"min_replicas": 3}, model=model)
    training.assert_went_on(plan)
