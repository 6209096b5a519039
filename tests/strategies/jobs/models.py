"""Modules and callbacks that ``train.py`` runs when its options name them: what is odd about each is in its docstring."""

import json
import os
import signal
from typing import Any

import torch
import torch.distributed.nn.functional as dist_nn
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchmetrics import MeanMetric
from train import Model

from lightning_ft.callbacks import LoaderPosition
from lightning_ft.elastic.leveling import Leveling
from lightning_ft.errors import GroupBrokenError
from lightning_ft.sharding.full_state import gather_full


class Contrastive(Model):
    """A collective inside backward, in every step."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.encoder, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        encoded = nn.functional.normalize(self.encoder(inputs))
        others = self.all_gather(encoded, sync_grads=True).flatten(0, 1)
        loss = (encoded @ others.T).logsumexp(1).mean() + nn.functional.mse_loss(self.head(encoded), targets)
        self.log("similarity", loss, sync_dist=True)
        return loss + super().training_step(batch, batch_idx)


class LateSum(Model):
    """A collective inside backward that no step before the fourth has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step < 3:
            return loss
        (middle,) = dist_nn.all_reduce(self.net[0](batch[0]).mean(0, keepdim=True))
        return loss + middle.square().mean()


class TrainsWhatIsNotFrozen(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class ThawsEncoder(BaseFinetuning):
    """Freezes the first layer, and gives it to the optimizer in epoch 1."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer)


class AddsGroup(Callback):
    """Gives a layer that was frozen until then to the optimizer when epoch 1 begins."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.1})


class FreezesAndAdds(Callback):
    """Freezes a layer for some steps, and gives a parameter that no optimizer had to it in step 3."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[4].bias.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.net[0].weight.requires_grad_(trainer.global_step % 4 != 2)
        pl_module.net[3].train(trainer.global_step < 5)
        if trainer.global_step == 3 and len(trainer.optimizers[0].param_groups) == 1:
            pl_module.net[4].bias.requires_grad_(True)
            (group,) = trainer.optimizers[0].param_groups
            group["params"] = [parameter for parameter in group["params"] if parameter is not pl_module.net[4].bias]
            trainer.optimizers[0].add_param_group({"params": [pl_module.net[4].bias], "lr": 0.1})


class LogsForItself(Model):
    """Epoch values of each rank alone: of its own batches, or of a batch that stands in for them if it had none."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.mean = MeanMetric(sync_on_compute=False)
        self.own: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("lowest", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("average", loss, on_step=False, on_epoch=True)
        if self.trainer.strategy.has_own_batch:
            self.own.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        found = {name: self.trainer.callback_metrics[name] for name in ("mean", "lowest", "average")}
        own, self.own = torch.tensor(self.own), []
        if len(own):
            expected = {"mean": own.mean(), "lowest": own.min(), "average": own.mean()}
            torch.testing.assert_close(found, expected)
        else:
            assert torch.stack(list(found.values())).isfinite().all(), found
        with open(f"own_{self.global_rank}", "a") as file:
            file.write(f"{len(own)}\n")


class LosesTouchInAdmission(Callback):
    """The admission of a joiner fails in slot 2 once all others completed it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        run, lost = Leveling.run, []

        def run_and_fail_once(self: Leveling, *args: Any) -> Any:
            outcome = run(self, *args)
            if outcome.joined and trainer.strategy.engine.slot == 2 and not lost:
                lost.append(outcome.joined)
                raise GroupBrokenError("injected after completion")
            return outcome

        Leveling.run = run_and_fail_once  # type: ignore[method-assign]


class OneCycle(Model):
    """In double precision, with a schedule that ends with the last step; keeps what it logged and its final weights."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.seen: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, samples = batch
        if self.hparams["dropout"]:
            inputs = inputs + 0.1 * torch.rand_like(inputs)
        outputs = self.net(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        self.train_error(outputs, targets)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("lowest", loss, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="min")
        loader = self.trainer.train_dataloader
        if getattr(loader, "ticket", None) is not None:
            line = json.dumps({"epoch": loader.plan.epoch, "ticket": loader.ticket, "samples": samples.tolist()})
            with open(f"samples_{os.getpid()}.jsonl", "a") as file:
                file.write(line + "\n")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {"batch_idx": batch_idx, "loss": self.trainer.callback_metrics["loss_step"]}
        values |= {"rate": self.trainer.optimizers[0].param_groups[0]["lr"], "step": self.trainer.global_step}
        for name, value in values.items():
            self.seen.setdefault(name, []).append(float(value))

    def on_train_epoch_end(self) -> None:
        for name in ("loss_epoch", "train_error", "lowest_epoch"):
            self.seen.setdefault(name, []).append(float(self.trainer.callback_metrics[name]))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.setdefault("validated after", []).append(self.trainer.global_step)

    def on_train_end(self) -> None:
        torch.save(
            {"weights": gather_full(self.state_dict()), "seen": self.seen}, f"end_{self.trainer.strategy.engine.slot}.pt"
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class InTensorParallel(Model):
    """Divides its layers among the ranks that work on one batch together."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
            plan = {"0": ColwiseParallel(), "4": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name in ("tensor_parallel", "data_parallel"):  # whatever its rank is by now
            part = self.device_mesh[name]
            assert part.get_coordinate() == (part.get_local_rank(),)
            assert part.get_group() is self.device_mesh.get_group(name)
        return super().training_step(batch, batch_idx)


class GathersInValidation(Model):
    """A collective in each validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("largest", self.all_gather(batch[0].amax()).max(), reduce_fx="max", sync_dist=True)


class DiesOnceReduced(Callback):
    """Kills two ranks when the gradients of a step are averaged; the others must find the same when they begin it again."""

    victims = ((0, 2), (3, 1))  # slots, and which of their processes

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        averages: dict[int, list[Tensor]] = {}

        def checking(closure: Any) -> Any:
            def checked() -> Any:
                loss = closure()
                average = [parameter.grad.to_local().clone() for parameter in pl_module.parameters()]
                before = averages.setdefault(trainer.global_step, average)
                assert all(torch.equal(mine, other) for mine, other in zip(average, before, strict=True))
                engine = trainer.strategy.engine
                if trainer.global_step >= 9 and (engine.slot, engine.incarnation) in self.victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.strategy.barrier("checked")
                return loss

            return checked

        trainer.strategy.check_gradients_with(checking)


class Position(LoaderPosition):
    """Under a name that options can have."""
