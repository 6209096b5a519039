"""What moves to another rank when rank 0 dies: the loggers' files and the progress bar."""

import csv
import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn


def logger_versions(trainer: Trainer) -> list[Any]:
    """Return the version that each logger writes to; right only on rank 0, which chose them."""
    return [getattr(logger, "version", None) for logger in trainer.loggers]


def adopt_versions(trainer: Trainer, versions: list[Any] | None) -> None:
    """Have the loggers of this rank know the version that rank 0 chose; each rank looks for a free one by itself."""
    for logger, version in zip(trainer.loggers, versions or [], strict=False):
        if hasattr(logger, "_version"):
            logger._version = version


def take_over(trainer: Trainer, pl_module: LightningModule, versions: list[Any]) -> None:
    """Log into the versions that the dead leader wrote, and show the progress bar.

    Args:
        trainer: The trainer of the new rank 0.
        pl_module: Its module.
        versions: What :func:`logger_versions` said on the first leader.

    """
    go_on(trainer, pl_module, versions, is_leader=True)
    bar = trainer.progress_bar_callback
    if bar is not None and trainer.state.fn == TrainerFn.FITTING:
        bar.enable()
        bar.on_train_start(trainer, pl_module)
        if not getattr(bar, "_leave", False):
            bar.on_train_epoch_start(trainer, pl_module)
        if trainer.validating or trainer.sanity_checking:
            bar.on_validation_start(trainer, pl_module)


def go_on(trainer: Trainer, pl_module: LightningModule, versions: list[Any], *, is_leader: bool) -> None:
    """Have loggers know the versions that there are; those of rank 0 write to them, behind what is there."""
    adopt_versions(trainer, versions)
    for logger in trainer.loggers if is_leader else ():
        _continue_logger(logger, pl_module)


def _continue_logger(logger: Logger, pl_module: LightningModule) -> None:
    if not hasattr(logger, "_version"):
        return  # it knows its run by other means
    if hasattr(logger, "_experiment"):
        logger._experiment = None  # the dummy of a rank other than 0
    if isinstance(logger, CSVLogger):
        logger._experiment = _open_csv(logger)
    if isinstance(logger, CSVLogger | TensorBoardLogger) and pl_module._log_hyperparams:
        hparams = logger.experiment.hparams if isinstance(logger, CSVLogger) else logger.hparams
        hparams.update(pl_module.hparams_initial)


def _open_csv(logger: CSVLogger) -> Any:
    """Return a writer that goes on with the file: the constructor would delete what the dead leader wrote."""
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    class Continued(ExperimentWriter):
        def _check_log_dir_exists(self) -> None:
            if os.path.isfile(self.metrics_file_path):
                with open(self.metrics_file_path, newline="") as file:
                    self.metrics_keys = next(csv.reader(file), [])

    return Continued(log_dir=logger.log_dir)
