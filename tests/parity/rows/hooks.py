"""Hooks that modules, data modules and callbacks override."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from row import CLIPPED, Net, Row, Run, train_loader, val_loader
from torch import Tensor
from torch.optim import SGD, lr_scheduler


class OwnSteps(Net):
    """Overrides how Lightning steps, clips, schedules and clears."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (self.trainer.global_step % 2)
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss.detach(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.log("grad_norm", norm)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class OwnClosures(Net):
    """Decides for each step whether it runs the closure itself, and whether the optimizer steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.trainer.global_step % 3 == 0:
            optimizer.step(closure=optimizer_closure)
            return
        loss = optimizer_closure()
        self.log("seen", loss + self.net[0].weight.grad.norm(), sync_dist=True)
        if self.trainer.global_step % 3 == 1:
            optimizer.step()


class SharpnessAware(Net):
    """Steps by the gradient at a point uphill (SAM), with two passes a step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        with torch.no_grad():
            uphill = [0.05 * p.grad / p.grad.norm() for p in self.parameters()]
            for parameter, way in zip(self.parameters(), uphill, strict=True):
                parameter.add_(way)
        optimizer_closure()
        with torch.no_grad():
            for parameter, way in zip(self.parameters(), uphill, strict=True):
                parameter.sub_(way)
        optimizer.step()


class OwnTransfer(Net):
    """Changes batches on their way."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1], batch[2]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device([batch[0] * 2, batch[1], batch[2]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - 1, batch[1], batch[2]]


class ByEpoch(Net):
    """Uses at the end of an epoch what it made at the beginning."""

    def on_train_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return {"loss": loss, "extra": loss.detach() * 2}

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.outputs).mean() if self.outputs else torch.zeros(()), sync_dist=True)

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.1)  # in a rank that comes back it must not stay


class Gathers(Net):
    """Collectives of the user's own in every stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        everybody = self.all_gather(loss.detach())
        self.log("spread", everybody.max() - everybody.min())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        gathered = self.all_gather({"numbers": batch[2], "loss": self.loss(batch)})
        self.log("val_numbers", gathered["numbers"].float().mean())

    def on_validation_epoch_end(self) -> None:
        self.trainer.strategy.barrier("mine")
        self.log("val_agreed", float(self.trainer.strategy.reduce_boolean_decision(True)))
        self.log("val_said", float(self.trainer.strategy.broadcast(self.trainer.global_rank + 5)))


class Remembers(Callback):
    """Has state of its own, which a checkpoint and a rank that comes back get."""

    def __init__(self) -> None:
        self.batches = 0
        self.epochs = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.epochs = state_dict["batches"], state_dict["epochs"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["remembered"] = self.batches


class Data(LightningDataModule):
    """Every hook of a data module."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []
        self.save_hyperparameters({"size": 24})

    def prepare_data(self) -> None:
        Path("prepared.txt").write_text("once")

    def setup(self, stage: str) -> None:
        assert Path("prepared.txt").read_text() == "once"
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return train_loader()

    def val_dataloader(self) -> Any:
        return val_loader()

    def test_dataloader(self) -> Any:
        return val_loader(seed=3)

    def predict_dataloader(self) -> Any:
        return val_loader(seed=4)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.5, batch[1], batch[2]]

    def state_dict(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict

    def teardown(self, stage: str) -> None:
        self.stages.append(f"end {stage}")


def with_data_module(run: Run) -> Any:
    data = Data()
    run.trainer.fit(run.module, datamodule=data)
    returned = [run.trainer.validate(run.module, datamodule=data, verbose=False)]
    returned.append(run.trainer.test(run.module, datamodule=data, verbose=False))
    returned.append(run.trainer.predict(run.module, datamodule=data))
    return returned, data.stages


ROWS = [
    Row("own steps", OwnSteps, sharded=CLIPPED),  # it logs the norm
    Row("own closures", OwnClosures),
    Row(
        "own closures of windows",
        OwnClosures,
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
        kill={"point": "gradients_ready", "step": 2},
    ),
    Row("closure twice", SharpnessAware),
    Row("own transfer", OwnTransfer),
    Row("begin and end of epochs", ByEpoch),
    Row("collectives in every stage", Gathers),
    Row("callback with state", callbacks=lambda: [Remembers()]),
    Row("data module", calls=with_data_module),
]
