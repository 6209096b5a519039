"""Ranks that stop, block and stall: whoever keeps the others waiting is replaced, and nobody else."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.events.audit import audit
from lightning_ft.testing import Fault, FaultPlan, assert_recovered, run_job

JOB = Path(__file__).parent / "jobs" / "hanging.py"


def test_a_stopped_rank_is_killed_after_the_timeout_and_comes_back(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="stop", slot=1, point="forward", step=3)])
    training = train(plan, ft={"timeout": 2.0, "min_replicas": 3})
    training.assert_went_on(plan)
    (death,) = audit(training.events).deaths
    assert re.fullmatch(r"hung for \d+ s, stopped \(SIGSTOP\)", death.how)
    assert death.recovery is not None
    assert death.recovery >= 1.9  # counted from the stop, and the step had begun a little before
    (change,) = [generation for generation in audit(training.events).generations if generation.reason == "death"]
    assert change.dead == (1,), "one timeout is enough"
    (join,) = audit(training.events).joins
    assert join.slot == 1


def test_ranks_that_stop_are_found_even_if_they_are_most_of_all(train: Callable[..., Any]) -> None:
    faults = [Fault(kind="stop", slot=slot, point="gradients_ready", step=3) for slot in (0, 2)]
    plan = FaultPlan(faults)
    training = train(plan, ft={"timeout": 2.0, "min_replicas": 3})
    training.assert_went_on(plan)
    assert {death.slot for death in audit(training.events).deaths} == {0, 2}


@pytest.mark.parametrize("point", ["operation_failed", "generation"])
def test_a_rank_that_stops_while_the_others_recover_from_a_death_is_killed_too(
    point: Any, train: Callable[..., Any]
) -> None:
    faults = [
        Fault(kind="kill", slot=2, point="gradients_ready", step=3, rendezvous=True),
        Fault(kind="stop", slot=1, point=point, step=3),
    ]
    plan = FaultPlan(faults)
    training = train(plan, ft={"timeout": 2.0, "min_replicas": 3})
    training.assert_went_on(plan)
    assert {death.slot: "SIGSTOP" in death.how for death in audit(training.events).deaths} == {2: False, 1: True}


@pytest.mark.parametrize("point", ["join_requested", "healed"])
def test_a_joiner_that_stops_on_its_way_in_is_replaced_and_holds_nobody_up(point: Any, train: Callable[..., Any]) -> None:
    faults = [
        Fault(kind="kill", slot=1, point="forward", step=3),
        Fault(kind="stop", slot=1, point=point, incarnation=1),
    ]
    plan = FaultPlan(faults)
    training = train(plan, ft={"timeout": 2.0, "min_replicas": 3})
    training.assert_went_on(plan)
    assert [death.incarnation for death in audit(training.events).deaths] == [0, 1]


@pytest.mark.parametrize(
    ("where", "place"), [("lock", "training_step"), ("dataset", "__getitem__"), ("worker", "_try_get_data")]
)
def test_a_rank_that_blocks_is_replaced_and_the_user_sees_where_it_was(where: str, place: str, tmp_path: Path) -> None:
    result = run_job(JOB, [where], num_slots=3, directory=tmp_path).check()
    assert_recovered(result.events)
    (death,) = audit(result.events).deaths
    assert re.match(rf"hung for \d+ s, in .* in {place}$", death.how)
    assert "did when the others gave up waiting for it" in result.stderr
    assert f", in {place}\n" in result.stderr


def test_storage_that_stalls_for_all_costs_nobodys_life(tmp_path: Path) -> None:
    result = run_job(JOB, ["storage"], num_slots=3, directory=tmp_path).check()
    assert audit(result.events).deaths == ()
    assert "not one rank's fault" in result.stderr
    assert "It goes on after" in result.stderr
