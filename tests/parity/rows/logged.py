"""What modules log, and where to."""

from typing import Any

import torch
import torchmetrics
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from row import Net, Row, val_loader
from torch import Tensor, nn


class LogsReduced(Net):
    """Every kind of reduction, synchronized and not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(f"sync_{reduce_fx}", loss, reduce_fx=reduce_fx, on_step=True, on_epoch=True, sync_dist=True)
            self.log(f"own_{reduce_fx}", loss, reduce_fx=reduce_fx, on_step=False, on_epoch=True)
        self.log("number", float(batch_idx), on_epoch=True, batch_size=batch_idx + 1)
        self.log("bar_only", loss, prog_bar=True, logger=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", self.trainer.callback_metrics["sync_mean_step"], sync_dist=True)


class LogsOnRankZero(Net):
    """Values that only rank 0 logs, and dictionaries."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True)
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True, sync_dist=True, batch_size=2)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_constant", torch.tensor(3.0), sync_dist=True)


class LogsPerLoader(Net):
    """Values with and without the loader's index in their name."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True)


class Metrics(Net):
    """Metrics of torchmetrics, by step and by epoch, alone and in collections."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.cat = torchmetrics.CatMetric()
        regression = {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score(multioutput="uniform_average")}
        self.train_metrics = torchmetrics.MetricCollection(regression, prefix="train_")
        self.val_metrics = self.train_metrics.clone(prefix="val_")
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.tracked = torchmetrics.MinMaxMetric(torchmetrics.MeanAbsoluteError())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1])
        self.error(outputs, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.log("mean", self.mean)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.train_metrics.update(outputs, batch[1])
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        outputs = self.net(batch[0])
        self.val_metrics.update(outputs, batch[1])
        self.log_dict(self.val_metrics)
        self.accuracy(outputs, batch[1].argmax(1))
        self.log("accuracy", self.accuracy)
        self.cat.update(outputs.detach().flatten())
        self.tracked.update(outputs, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("cat", self.cat.compute().sort().values.sum())
        self.cat.reset()
        self.log("tracked", self.tracked.compute()["min"])


class DirectlyLogged(Net):
    """Speaks to its logger by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3, "name": "direct"})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for logger in self.loggers:
            logger.log_metrics({"direct": float(loss)}, step=self.global_step)
        return loss


def many_loggers() -> dict[str, Any]:
    return {"logger": [CSVLogger(".", name="csv"), CSVLogger(".", name="second"), TensorBoardLogger(".", name="board")]}


ROWS = [
    Row("every reduction", LogsReduced),
    Row("rank zero and dictionaries", LogsOnRankZero),
    Row("several validation loaders", LogsPerLoader, val=lambda: [val_loader(), val_loader(seed=3)]),
    Row("metrics", Metrics),
    Row("several loggers", trainer=many_loggers),
    Row("logger by hand and hyperparameters", DirectlyLogged),
    Row("log_every_n_steps", trainer={"log_every_n_steps": 3}),
    Row("no logger", trainer={"logger": False}),
    Row("learning rate monitor", callbacks=lambda: [LearningRateMonitor("step", log_momentum=True)]),
    Row("device stats", callbacks=lambda: [DeviceStatsMonitor(cpu_stats=False)]),
]
