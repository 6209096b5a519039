"""Parameters that are frozen, unfrozen and given to the optimizer while training runs, with ranks that die and come back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_ft.testing import Fault, FaultPlan, assert_weights_equal


@pytest.mark.parametrize("callback", ["ThawsEncoder", "AddsGroup", "FreezesAndAdds"])
def test_a_joiner_has_the_groups_and_the_frozen_parameters_of_the_others(callback: str, train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="backward_early", step=2, rendezvous=True),
            Fault(kind="kill", slot=1, point="forward", step=9),
            Fault(kind="kill", slot=2, point="train_epoch_start", step=8),
        ]
    )
    model = "Model" if callback == "FreezesAndAdds" else "TrainsWhatIsNotFrozen"
    training = train(plan, ft={"min_replicas": 3}, model=model, callbacks=[callback], batch_norm=True, dropout=0.3)
    training.assert_went_on(plan)
    last = torch.load(training.directory / "best" / "last.ckpt", weights_only=True)
    assert len(last["optimizer_states"][0]["param_groups"]) == 2


def test_parameters_that_come_and_go_equal_those_under_ddp(
    train: Callable[..., Any], train_with_ddp: Callable[..., Any]
) -> None:
    ours = train(devices=2, callbacks=["FreezesAndAdds"], dropout=0.3)
    ours.job.check()
    theirs = train_with_ddp(strategy="ddp_find_unused_parameters_true", callbacks=["FreezesAndAdds"], dropout=0.3)
    theirs.job.check()
    assert_weights_equal(ours.results[0]["fingerprint"], theirs.results[0]["fingerprint"])
