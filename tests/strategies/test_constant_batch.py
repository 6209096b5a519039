"""With a constant global batch a training whose ranks die takes the steps that it would take without faults."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft import FTStrategy
from lightning_ft.events.audit import audit
from lightning_ft.strategies.extra_passes import ExtraPasses
from lightning_ft.testing import Fault, FaultPlan

OPTIONS: dict[str, Any] = {"model": "OneCycle", "precision": "64-true", "checkpoints": False}
CONSTANT = {"global_batch": "constant"}


def ends(training: Any) -> dict[int, dict[str, Any]]:
    return {int(path.stem.removeprefix("end_")): torch.load(path) for path in training.directory.glob("end_*.pt")}


def assert_trained_as(whole: dict[str, Any], end: dict[str, Any]) -> None:
    for name, value in end["weights"].items():
        if "running" not in name:  # those of rank 0, which is another slot after its death
            torch.testing.assert_close(value, whole["weights"][name], rtol=1e-9, atol=1e-12, msg=name)
    for name in ("batch_idx", "step", "rate"):
        values = end["seen"][name]
        assert values == pytest.approx(whole["seen"][name][-len(values) :], rel=1e-12), name


def test_two_ranks_that_stay_away_leave_steps_schedule_and_logged_values_as_they_were(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=2, point="gradients_ready", step=2),
            Fault(kind="kill", slot=0, point="forward", step=5),
        ]
    )
    options = {**OPTIONS, "dropout": 0.2}  # drawn by each pass as by the replica that it stands for
    whole = train(name="whole", ft=CONSTANT, **options)
    training = train(plan, ft={**CONSTANT, "max_restarts": 0}, **options)
    training.assert_went_on(plan)
    (end,) = ends(training).values()
    expected = ends(whole)[0]
    assert_trained_as(expected, end)
    assert end["seen"]["loss"] == pytest.approx(expected["seen"]["loss"])
    for name in ("loss_epoch", "train_error", "lowest_epoch"):  # of the epoch in which nobody died
        assert end["seen"][name][1] == pytest.approx(expected["seen"][name][1], rel=1e-6)
    assert len(whole.of("step")) == 3 * audit(training.events).steps[-1]


def test_windows_of_accumulation_are_whole_and_extra_passes_end_when_ranks_are_back(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="backward_early", step=1, occurrence=1),
            Fault(kind="kill", slot=1, point="forward", step=4),
            Fault(kind="kill", slot=0, point="gradients_ready", step=7, incarnation=1, rendezvous=True),
            Fault(kind="kill", slot=2, point="gradients_ready", step=7, rendezvous=True),
        ]
    )
    options = {**OPTIONS, "num_samples": 94, "accumulate": 3, "clip": 0.1, "batch_norm": True, "workers": 1, "max_epochs": 3}
    whole = train(name="whole", ft=CONSTANT, **options)
    training = train(plan, ft={**CONSTANT, "min_replicas": 3}, **options)
    training.assert_went_on(plan, num_samples=94, max_epochs=3)
    for end in ends(training).values():
        assert_trained_as(ends(whole)[0], end)


@pytest.mark.parametrize(
    ("module", "optimizer", "message"),
    [
        (SimpleNamespace(automatic_optimization=False), torch.optim.SGD, "needs automatic optimization.*Use.*shrink"),
        (BoringModel(), torch.optim.LBFGS, "with LBFGS.*Use.*shrink"),
    ],
)
def test_what_cannot_take_further_passes_is_refused(module: Any, optimizer: Any, message: str) -> None:
    trainer: Any = SimpleNamespace(optimizers=[optimizer(BoringModel().parameters(), lr=0.1)])
    nothing: Any = None
    passes = ExtraPasses(trainer, module, nothing, nothing, nothing, nothing)
    with pytest.raises(MisconfigurationException, match=message):
        passes.check()
    with pytest.raises(MisconfigurationException, match="needs data that every rank can read"):
        passes.follow([torch.zeros(2, 32)])


def test_replicas_that_are_left_take_the_batches_of_those_that_lost_a_rank_in_the_same_step(
    train: Callable[..., Any],
) -> None:
    # Each time both ranks of a replica are away: the mate of the dead one begins anew.
    deaths = [
        Fault(kind="kill", slot=1, point="backward_early", step=2),
        Fault(kind="kill", slot=2, point="gradients_ready", step=4),
        Fault(kind="kill", slot=0, point="validation_batch", step=6, incarnation=1),
    ]
    options = {**OPTIONS, "devices": 4, "dropout": 0.2, "accumulate": 2, "clip": 0.1, "timeout": 150.0}
    whole = train(name="whole", ft={**CONSTANT, "shard_size": 2}, **options)
    for plan, more, num_ranks in (
        (FaultPlan(deaths), {"min_replicas": 2}, [4, 4, 2, 4, 2, 4]),
        (FaultPlan(deaths[:1]), {"max_restarts": 0}, [4, 4, 2, 2, 2, 2]),
    ):
        training = train(plan, name=next(iter(more)), ft={**CONSTANT, "shard_size": 2, **more}, **options)
        training.assert_went_on(plan)
        assert {event["step"]: len(event["members"]) for event in training.of("step")} == dict(enumerate(num_ranks, 1))
        assert not audit(training.events).partial
        for end in ends(training).values():
            assert_trained_as(ends(whole)[0], end)


def test_ranks_that_share_their_batches_are_refused_before_anything_runs() -> None:
    strategy = FTStrategy(2, tensor_parallel_size=2, global_batch="constant")
    with pytest.raises(MisconfigurationException, match=r"global_batch=.constant.*with tensor parallelism.*Use.*shrink"):
        Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


def test_limits_and_intervals_in_batches_mean_what_they_mean_without_faults(train: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="backward_early", step=3),
            Fault(kind="kill", slot=2, point="forward", step=7),
        ]
    )
    trainer = {"limit_train_batches": 0.75, "reload_dataloaders_every_n_epochs": 1}
    options = {**OPTIONS, "dropout": 0.2, "val_check_interval": 0.5, "max_steps": 13, "max_epochs": 3, "trainer": trainer}
    whole = train(name="whole", ft=CONSTANT, **options)
    training = train(plan, ft=CONSTANT, **options)
    training.job.check()
    training.assert_ranks_agree()
    assert audit(training.events).problems(unfinished_epoch=True) == []
    for end in ends(training).values():
        assert_trained_as(ends(whole)[0], end)
    expected = ends(whole)[0]["seen"]
    assert ends(training)[0]["seen"]["loss"] == pytest.approx(expected["loss"])
    assert ends(training)[0]["seen"]["validated after"] == expected["validated after"]
