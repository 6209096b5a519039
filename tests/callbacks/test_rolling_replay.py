"""Silent corruption on one device, found in its step by running steps again, which leaves no trace in the training."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ft.callbacks import ReplayOptions, RerunValidation
from tests.callbacks.rerun_fits import OPTIONS, Fault, Model, Training, always, assert_same_training, fit, once


class Scheduled(Model):
    """Has a schedule, clips, and computes by where it is in the training."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + 0.01 * self.trainer.global_step + 0.1 * self.trainer.current_epoch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        for gradient in gradients:
            gradient.mul_(0.9)
        self.log("norm", sum(gradient.norm() for gradient in gradients), on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tampering(Callback):
    """Changes something after a batch."""

    def __init__(self, change: Callable[[Trainer, Any], None], batch_idx: int = 12) -> None:
        self.change, self.batch_idx = change, batch_idx

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            with torch.no_grad():
                self.change(trainer, pl_module)


def train(
    fault: Fault | None = None,
    change: Callable[..., None] | None = None,
    replay: ReplayOptions | None = None,
    *,
    averages: bool = False,
    **options: Any,
) -> tuple[Training, RerunValidation]:
    validation = RerunValidation(replay=replay, without_opinion="assume_correct", on_correct="skip_batch")
    more: list[Callback] = [] if change is None else [Tampering(change)]
    more += [EMAWeightAveraging(decay=0.9)] if averages else []  # which the module gets in the end
    return fit(validation, fault, model=Scheduled(), more=more, **options), validation


@pytest.mark.parametrize(("name", "accumulate"), [("plain", 1), ("fp16", 3), ("bf16", 2), ("ft", 3)])
def test_a_training_whose_steps_are_all_run_twice_is_as_without_and_nothing_differs(name: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "max_epochs": 2, "gradient_clip_val": 0.3}
    ours, validation = train(replay=ReplayOptions(4, "always"), averages=True, **{**options, **OPTIONS[name]()})
    known, _ = train(averages=True, **{**options, **OPTIONS[name]()})
    assert_same_training(ours, known)
    steps = known[0].global_step
    ends = [*range(5, steps + 1, 4), steps + 1]  # also across the end of an epoch, and the last ones
    told = [(row["first"], row["step"], row["began"]) for row in validation.replays]
    assert told == [(end - (4 if end <= steps else (steps - 1) % 4 + 1), end, None) for end in ends]


def nudge_parameter(trainer: Trainer, pl_module: Any) -> None:
    pl_module.net[0].weight[3, 2] *= 1.0 + 1e-6


def nudge_optimizer(trainer: Trainer, pl_module: Any) -> None:
    trainer.optimizers[0].state[pl_module.net[4].bias]["exp_avg"] += 1e-4


def scale_gradient(loss: Tensor) -> Tensor:
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * 1.01)
    return loss


@pytest.mark.parametrize(
    ("fault", "change", "began", "what"),
    [
        (None, nudge_parameter, 14, "parameters"),
        (None, nudge_optimizer, 15, "parameters"),  # in the step after, which applied it
        (lambda: once(12, lambda loss: loss * 1.01), None, 13, "loss"),
        (lambda: once(12, scale_gradient), None, 13, "gradient norm"),
    ],
)
def test_a_small_corruption_is_found_in_its_step(fault: Any, change: Any, began: int, what: str) -> None:
    make: Callable[[], Fault | None] = fault or (lambda: None)
    ours, validation = train(make(), change, ReplayOptions(6, "always"))
    known, _ = train(make(), change)
    assert_same_training(ours, known)
    assert not validation.rows
    found = [row for row in validation.replays if row["began"] is not None]
    assert [(row["began"], row["what"], row["ranks"]) for row in found] == [(began, what, [0])]
    assert bool(found[0]["names"]) == (what == "parameters")


def test_a_rejection_is_traced_to_the_step_where_it_began() -> None:
    """Here parameters were changed three steps before, and it takes a certain batch to make a NaN of that."""

    def spoil(trainer: Trainer, pl_module: Any) -> None:
        pl_module.net[1].weight[0] += 0.5

    def fault(model: Model, batch_idx: int, loss: Tensor) -> Tensor:
        return loss * math.nan if batch_idx == 16 and model.net[1].weight[0] > 1.3 else loss

    ours, validation = train(fault, spoil, ReplayOptions(8))
    known, _ = train(fault, spoil)
    assert_same_training(ours, known, told_before=16)  # which is no number in both
    told = [(row["step"], row["name"], row["action"], row["since_step"], row["since_ranks"]) for row in validation.rows]
    assert told == [(17, "loss", "skip_batch", 14, [0])]
    _, validation = train(always(20, lambda loss: loss * math.nan), None, ReplayOptions(8))
    assert [row["began"] for row in validation.replays] == [None]  # the data is to blame
    assert not any("since_step" in row for row in validation.rows)


def test_what_cant_be_run_again_is_told() -> None:
    class Lbfgs(Scheduled):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(MisconfigurationException, match="with `LBFGS`: its steps can't be run again"):
        fit(RerunValidation(replay=ReplayOptions()), model=Lbfgs())
    with pytest.raises(TypeError, match="expected `ReplayOptions` or None"):
        RerunValidation(replay=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_n_train_steps=0"):
        ReplayOptions(0)
