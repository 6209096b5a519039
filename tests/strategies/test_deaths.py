"""A rank is killed at every named point of a training, and the training goes on as if it had not been."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_ft.events.audit import audit
from lightning_ft.testing import Fault, FaultPlan, assert_reconfigurations

IN_A_STEP = ("train_batch_start", "forward", "backward_early", "gradients_ready", "before_optimizer_step")
AROUND_STEPS = ("train_batch_end", "validation_start", "validation_batch", "validation_end", "train_epoch_end")
SAVING = ("save_checkpoint", "during_save")


def one_after_the_other(points: tuple[str, ...], slots: tuple[int, ...], steps: tuple[int, ...], **more: Any) -> FaultPlan:
    """A plan of one death at each point; a slot's later deaths are those of its later incarnations."""
    deaths: Counter[int] = Counter()
    faults = []
    for point, slot, step in zip(points, slots, steps, strict=True):
        faults.append(Fault(kind="kill", slot=slot, point=point, step=step, incarnation=deaths[slot], **more))
        deaths[slot] += 1
    return FaultPlan(faults)


# `min_replicas` makes the survivors wait for each respawn, so that every death finds the same ranks alive. Slot 0 leads
# until its first death, then slot 1 does, and so on.
@pytest.mark.parametrize("rendezvous", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("slots", [(0, 1, 2, 0, 1), (2, 1, 0, 2, 1)], ids=["leaders", "others"])
def test_a_death_within_a_step_costs_neither_a_step_nor_a_sample(
    slots: tuple[int, ...], rendezvous: bool, train: Callable[..., Any]
) -> None:
    plan = one_after_the_other(IN_A_STEP, slots, (2, 4, 6, 11, 13), rendezvous=rendezvous)
    training = train(plan, ft={"min_replicas": 3}, dropout=0.2, batch_norm=True)
    training.assert_went_on(plan)
    alternating = [("death", "join")[n % 2] for n in range(2 * len(IN_A_STEP))]
    reasons = [generation.reason for generation in audit(training.events).generations]
    assert reasons[: 1 + len(alternating)] == ["start", *alternating]


def test_survivors_finish_the_step_with_the_gradients_they_have(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="backward_early", step=3, rendezvous=True)])
    training = train(plan, ft={"max_restarts": 0})
    training.assert_went_on(plan)
    assert_reconfigurations(training.events, ["start", ("death", 1)])
    steps = {event["step"]: event for event in training.of("step")}
    assert steps[3]["members"] == [0, 1, 2]
    assert steps[4]["members"] == [0, 2]
    assert set(training.results) == {0, 2}


@pytest.mark.parametrize("slots", [(0, 1, 2, 0, 1), (2, 1, 0, 2, 1)], ids=["leaders", "others"])
def test_a_death_around_steps_costs_nothing(slots: tuple[int, ...], train: Callable[..., Any]) -> None:
    plan = one_after_the_other(AROUND_STEPS, slots, (2, 4, 8, 12, 14))
    training = train(plan, ft={"min_replicas": 3}, val_check_interval=0.5, max_epochs=3, workers=0)
    training.assert_went_on(plan, max_epochs=3)


@pytest.mark.parametrize("point", SAVING)
def test_the_death_of_the_leader_in_a_save_leaves_whole_checkpoints_only(point: str, train: Callable[..., Any]) -> None:
    plan = one_after_the_other((point, point), (0, 1), (5, 10))
    training = train(plan, ft={"min_replicas": 2})
    training.assert_went_on(plan)
    checkpoints = {path.name: path for path in training.directory.glob("*/*.ckpt")}
    assert {"step=5.ckpt", "step=10.ckpt", "last.ckpt"} <= checkpoints.keys()
    for path in checkpoints.values():
        assert torch.load(path, weights_only=True)["global_step"] > 0
    last = torch.load(checkpoints["last.ckpt"], weights_only=True)
    assert last["global_step"] == training.results[2]["global_step"]


@pytest.mark.parametrize("point", ["setup", "fit_start", "sanity_check", "train_start", "train_epoch_start"])
def test_a_death_before_the_first_step_delays_only_its_slot(point: str, train: Callable[..., Any]) -> None:
    slot = 0 if point in ("fit_start", "train_epoch_start") else 1
    plan = FaultPlan([Fault(kind="kill", slot=slot, point=point)])
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert len(audit(training.events).deaths) == 1


@pytest.mark.parametrize("slot", [0, 1])
def test_a_death_after_the_last_step_costs_nothing(slot: int, train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=slot, point="train_end")])
    training = train(plan)
    training.job.check()
    training.assert_went_on(plan)


def test_two_ranks_that_die_at_once_are_one_reconfiguration_or_two(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="gradients_ready", step=4, rendezvous=True),
            Fault(kind="kill", slot=2, point="gradients_ready", step=4, rendezvous=True),
        ]
    )
    training = train(plan, ft={"min_replicas": 3})
    training.assert_went_on(plan)
    assert {death.slot for death in audit(training.events).deaths} == {0, 2}


def test_one_rank_left_goes_on_alone(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="forward", step=3),
            Fault(kind="kill", slot=1, point="before_optimizer_step", step=5),
        ]
    )
    training = train(plan, ft={"max_restarts": 0})
    training.assert_went_on(plan)
    assert set(training.results) == {2}


def test_a_death_in_an_accumulation_window_costs_nothing(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="backward_early", step=1, occurrence=1),
            Fault(kind="kill", slot=1, point="train_batch_end", step=3, occurrence=1),
        ]
    )
    training = train(plan, accumulate=3, max_epochs=3, batch_size=2)
    training.assert_went_on(plan, max_epochs=3)


def test_what_a_respawned_rank_knows_of_the_loggers_is_what_the_others_know(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="forward", step=3)])
    training = train(plan, ft={"min_replicas": 3}, loggers=["csv", "tensorboard"])
    training.assert_went_on(plan)
    assert [training.results[slot]["versions"] for slot in range(3)] == [[0, 0]] * 3
