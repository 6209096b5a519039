"""A fit on one device with all that a rerun must restore, and faults for it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import RerunValidation

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
Fault = Callable[["Model", int, Tensor], Tensor]


class Model(LightningModule):
    """Has all that a rerun must restore: dropout, BatchNorm, noise, metrics, logged values."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.fault = fault
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs + 0.01 * torch.randn_like(inputs)).float()
        loss = nn.functional.mse_loss(outputs, targets)
        self.error(outputs, targets)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.calls.append(batch_idx)
        if self.fault is not None:
            loss = self.fault(self, batch_idx, loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("count", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Outputs(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else math.nan)


Training = tuple[Trainer, Model, Outputs]


def once(batch_idx: int, kind: Callable[[Tensor], Tensor]) -> Fault:
    """A fault of the device that happens in one batch, and not when that is run again."""
    done: list[int] = []

    def fault(model: Model, index: int, loss: Tensor) -> Tensor:
        if index == batch_idx and not done:
            done.append(index)
            return kind(loss)
        return loss

    return fault


def always(batch_idx: int, kind: Callable[[Tensor], Tensor]) -> Fault:
    return lambda model, index, loss: kind(loss) if index == batch_idx else loss


def nan(loss: Tensor) -> Tensor:
    return loss * math.nan


def spike(loss: Tensor) -> Tensor:
    return loss * 1e6


def fit(
    validation: RerunValidation | None,
    fault: Fault | None = None,
    *,
    model: Model | None = None,
    num_batches: int = 36,
    accumulate: int = 1,
    ckpt_path: str | None = None,
    max_epochs: int = 1,
    more: Sequence[Callback] = (),
    **options: Any,
) -> Training:
    seed_everything(3, verbose=False)
    inputs = torch.randn(4 * num_batches, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, outputs = model or Model(), Outputs()
    model.fault = fault
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        **QUIET,
        callbacks=[outputs, *more, *([] if validation is None else [validation])],
        **options,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer, model, outputs


def assert_same_training(one: Training, other: Training, *, told_before: int | None = None) -> None:
    """Also what hooks saw, but for the loss of a batch that was through, within its step, before the fault was known."""
    for (name, value), (_, known) in zip(one[1].state_dict().items(), other[1].state_dict().items(), strict=True):
        assert torch.equal(value, known), name
    assert one[0].callback_metrics == other[0].callback_metrics
    assert one[0].global_step == other[0].global_step
    differing = [
        index for index, losses in enumerate(zip(one[2].losses, other[2].losses, strict=True)) if len({*losses}) > 1
    ]
    assert differing == ([] if told_before is None else [told_before])
    progress = [
        training[0].fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict() for training in (one, other)
    ]
    assert progress[0] == progress[1]
    assert torch.equal(
        one[0].strategy.optimizers[0].state_dict()["state"][0]["exp_avg"],
        other[0].strategy.optimizers[0].state_dict()["state"][0]["exp_avg"],
    )


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bf16": lambda: {"precision": "bf16-mixed"},
    "fp16": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))]},
    "ft": lambda: {"strategy": FTStrategy(), "gradient_clip_val": 0.1},
}
