import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ft.callbacks import RerunValidation
from lightning_ft.rerun.tracker import read_iterations_to_skip
from tests.callbacks.rerun_fits import Model, always, assert_same_training, fit, nan, once


class WithOwnValues(Model):
    """Has a number, and a value of a kind of its own, validated beside the loss."""

    def __init__(self, validation: RerunValidation, wrong: dict[int, Any]) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.validation, self.wrong = validation, wrong
        self.accepted: list[tuple[int, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shares = torch.softmax(self.net[0](batch[0]).detach(), 1).mean(0)
        validate = self.validation.validate
        accepted = validate("entropy", self.wrong.pop(batch_idx, -(shares * shares.log()).sum()))
        is_uneven = lambda value: bool(value.max() > 0.9) or batch_idx == 20  # noqa: E731
        distance = lambda one, other: float((one - other).abs().max())  # noqa: E731
        validate("shares", shares, is_uneven, distance, 1e-6, fatal=False)
        self.accepted.append((batch_idx, accepted))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert self.validation.validate("entropy", math.nan)  # a rerun would not come here


@pytest.mark.parametrize("accumulate", [1, 3])
def test_values_of_the_modules_own_are_validated_and_told_with_their_batch(accumulate: int) -> None:
    known = fit(None, model=WithOwnValues(RerunValidation(), {}), accumulate=accumulate)
    validation = RerunValidation()
    model = WithOwnValues(validation, {7: math.nan})
    ours = fit(validation, model=model, accumulate=accumulate)
    told = [(row["batch_idx"], row["name"], row["verdict"], row["action"]) for row in validation.rows]
    assert told == [
        (7, "entropy", "transient_error", "rerun"),
        (20, "shares", "undecided", "apply"),  # the same twice, and not fatal
    ]
    assert validation.rows[1]["value"].startswith("tensor([")
    assert [accepted for batch_idx, accepted in model.accepted if batch_idx == 7] == [False, True]
    assert_same_training(ours, known)


class InPlace(Model):
    """Changes some of its batches in place."""

    def __init__(self, batches: Any) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in self.batches:
            batch[0].add_(1.0)
        return super().training_step(batch, batch_idx)


def test_batches_that_the_step_changes_in_place_are_as_they_were_when_it_is_run_again() -> None:
    known = fit(None, model=InPlace(range(36)))
    for batch_idx in (0, 1, 35):  # the first step, where it is not known yet, included
        validation = RerunValidation()
        ours = fit(validation, once(batch_idx, nan), model=InPlace(range(36)))
        assert {row["verdict"] for row in validation.rows} == {"transient_error"}
        assert_same_training(ours, known)


def test_a_step_that_changes_its_batch_for_the_first_time_is_not_run_again_on_the_changed_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    validation = RerunValidation(without_opinion="assume_correct")
    with caplog.at_level(logging.INFO, "lightning_ft"):
        _, model, _ = fit(validation, once(7, nan), model=InPlace({7, 9}))
    assert "changed its batch in place: this step can't be run again" in caplog.text
    assert model.calls.count(7) == 1
    assert [(row["batch_idx"], row["rerun_value"], row["action"]) for row in validation.rows] == [(7, None, "skip_batch")]
    assert all(value.isfinite().all() for value in model.state_dict().values())
    validation = RerunValidation()
    ours, known = fit(validation, once(9, nan), model=InPlace({7, 9})), fit(None, model=InPlace({7, 9}))
    assert {row["verdict"] for row in validation.rows} == {"transient_error"}  # from the first one on they are copied
    assert_same_training(ours, known)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_in_which_two_jobs_failed_is_left_out_by_the_third(accumulate: int, tmp_path: Path) -> None:
    file = str(tmp_path / "rejected.txt")
    options: dict[str, Any] = {"accumulate": accumulate, "default_root_dir": str(tmp_path)}
    step = 7 // accumulate + 1
    for _ in range(2):
        assert read_iterations_to_skip(file) == []
        with pytest.raises(SystemExit, match="on other devices") as ended:
            fit(RerunValidation(tracker_file=file), always(7, nan), **options)
        assert ended.value.code == 16
        assert f"rank=0 iteration={step} status=first_rerun_reproducible result=nan message='loss'" in Path(file).read_text()
    assert read_iterations_to_skip(file) == [step]
    known = fit(RerunValidation(without_opinion="assume_correct"), always(7, nan), **options)
    for fault in (always(7, nan), None):  # also if it would go well now
        validation = RerunValidation(tracker_file=file)
        ours = fit(validation, fault, **options)
        assert not validation.rows
        assert ours[1].calls == list(range(36))
        for (name, value), (_, expected) in zip(ours[1].state_dict().items(), known[1].state_dict().items(), strict=True):
            assert torch.equal(value, expected), name


def test_a_loss_that_is_only_large_does_not_get_a_gradient_applied_that_is_not_finite() -> None:
    def burst(loss: Tensor) -> Tensor:
        loss = loss * 1e6
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    validation = RerunValidation(without_opinion="assume_correct", on_spike="apply", on_correct="skip_batch")
    _, model, _ = fit(validation, always(30, burst))
    assert {(row["step"], row["action"]) for row in validation.rows} == {(31, "skip_batch")}
    assert all(value.isfinite().all() for value in model.state_dict().values())
