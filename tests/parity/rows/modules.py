"""Kinds of modules."""

from typing import Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from row import CLIPPED, Net, Row, train_loader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Normalized(Net):
    """BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


class Tied(Net):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.net[2].weight = self.net[0].weight


class Frozen(Net):
    """A part that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Unused(Net):
    """A branch that is used in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0]) + (self.branch(batch[0]) if batch_idx % 2 else 0)
        loss = nn.functional.mse_loss(outputs, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss


class Checkpointed(Net):
    """Computes activations again in the backward pass."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])


class CompiledPart(Net):
    """A compiled submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Quiet(Net):
    """Logs nothing, which a compiled step could not do under ``ddp`` either."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)


class Configured(Net):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Counting(Net):
    """Buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        self.scratch.add_(batch[0].mean())
        return super().training_step(batch, batch_idx)


class Queueing(Net):
    """Buffers whose shapes training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 8))
        self.part = nn.Module()
        self.part.register_buffer("queue", torch.zeros(0, 8), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.queue = torch.cat([self.queue, batch[0]])[-5:]
        self.part.queue = torch.cat([self.part.queue, batch[0]])[-3:]
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + (self.net(self.queue) - self.net(self.part.queue).mean()).square().mean()


class Backboned(Net):
    """What ``BackboneFinetuning`` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4)
        self.net = nn.Identity()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return optimizer


class TwoOptimizers(Net):
    """Manual optimization, two optimizers taking turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = nn.functional.mse_loss(self.other(self.net(batch[0]).detach()), batch[1])
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log_dict({"loss": loss, "other": other}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        second = torch.optim.SGD(self.other.parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]


class Lbfgs(Net):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


ROWS = [
    Row("batch norm and dropout", Normalized, train=lambda: train_loader(batch_size=4), kill={"step": 1}),
    Row("tied weights", Tied),
    Row("frozen part", Frozen),
    Row("unused now and then", Unused, ddp="ddp_find_unused_parameters_true", ft={"find_unused_parameters": True}),
    Row("activation checkpointing", Checkpointed),
    Row("compiled part", CompiledPart, kill={"point": "forward"}),
    Row("compiled module", lambda: torch.compile(Quiet(), backend="eager"), kill={"point": "forward"}),
    Row("configured late", Configured),
    Row("buffers", Counting),
    Row("buffers that grow", Queueing),
    Row("weight averaging", callbacks=lambda: [WeightAveraging()]),
    Row("moving average", callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    Row(
        "stochastic weight averaging",
        trainer={"max_epochs": 4},
        callbacks=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
    ),
    Row(
        "pruning",
        callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.2, verbose=0)],
        sharded="shards can't be pruned. Use `FTStrategy(shard_size=1)`.",
    ),
    Row(
        "finetuning",
        Backboned,
        trainer={"max_epochs": 3},
        ddp="ddp_find_unused_parameters_true",
        callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.05)],
        differs=dict.fromkeys(
            ("steps", "weights", "callback_metrics", "logged_metrics", "files"),
            "under ddp a parameter that was frozen at first is never averaged, and the ranks drift apart",
        ),
    ),
    Row(
        "two optimizers by hand",
        TwoOptimizers,
        ddp="ddp_find_unused_parameters_true",
        sharded=CLIPPED,
    ),
    Row(
        "lbfgs",
        Lbfgs,
        sharded="Use `FTStrategy(shard_size=1)`, or another optimizer.",
        differs=dict.fromkeys(("weights", "files"), "the losses by which LBFGS decides when to stop are those of all ranks"),
    ),
]
