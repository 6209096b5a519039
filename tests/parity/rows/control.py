"""How long a training is, when it validates, and when it stops."""

from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, Timer
from row import Net, Row, Run, train_loader


class StopsAt(Callback):
    """Asks to stop after a step, on every rank."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= self.step:
            trainer.should_stop = True


class SkipsRest(Net):
    """Ends each epoch after two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def counts(run: Run) -> Any:
    run.fit()
    trainer = run.trainer
    return [trainer.num_training_batches, trainer.num_val_batches, trainer.estimated_stepping_batches]


ROWS = [
    Row("max_steps", trainer={"max_steps": 5}, cut=True, kill={"step": 2}),
    Row("max_steps over epochs", trainer={"max_steps": 9, "max_epochs": -1}, cut=True),
    Row("limits as numbers", trainer={"limit_train_batches": 3, "limit_val_batches": 2}, calls=counts, kill={"step": 2}),
    Row("limits as fractions", trainer={"limit_train_batches": 0.5, "limit_val_batches": 0.5}, kill={"step": 2}),
    Row("fast_dev_run", trainer={"fast_dev_run": 4}, kill={"step": 2, "point": "forward"}, audited=False),
    Row("overfit_batches", trainer={"overfit_batches": 2, "max_epochs": 3}, kill={"step": 2, "point": "forward"}),
    Row("overfit a fraction", trainer={"overfit_batches": 0.5, "max_epochs": 3}, kill={"step": 2, "point": "forward"}),
    Row("max_time that is long enough", trainer={"max_time": {"hours": 1}, "max_epochs": 2}),
    Row("max_time that is over", trainer={"max_time": "00:00:00:00"}, kill=False),
    Row("timer", callbacks=lambda: [Timer(timedelta(hours=1), interval="epoch")]),
    Row("min_steps", trainer={"min_steps": 5}, callbacks=lambda: [StopsAt(2)], cut=True, kill={"step": 2}),
    Row("min_epochs", trainer={"min_epochs": 2, "max_epochs": 4}, callbacks=lambda: [StopsAt(2)]),
    Row("should_stop", callbacks=lambda: [StopsAt(3)], cut=True, kill={"step": 1, "point": "forward"}),
    Row("early stopping", trainer={"max_epochs": 6}, callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=9)]),
    Row("early stopping in training", callbacks=lambda: [EarlyStopping("loss_epoch", check_on_train_epoch_end=True)]),
    Row("val_check_interval", trainer={"val_check_interval": 0.5}),
    Row("val_check_interval in batches", trainer={"val_check_interval": 3}),
    Row("val_check_interval over epochs", trainer={"val_check_interval": 4, "check_val_every_n_epoch": None}),
    Row("check_val_every_n_epoch", trainer={"check_val_every_n_epoch": 2, "max_epochs": 3}, kill={"point": "forward"}),
    Row("no validation", trainer={"limit_val_batches": 0}, kill={"point": "backward_early"}),
    Row("no sanity check", trainer={"num_sanity_val_steps": 0}),
    Row("whole sanity check", trainer={"num_sanity_val_steps": -1}),
    Row("rest skipped", SkipsRest, kill={"point": "forward", "step": 1}, audited=False, unbalanced=["train_batch"]),
    Row("barebones", trainer={"barebones": True, "logger": None, "recorded": False}, kill=False),
    Row("detect anomaly", trainer={"detect_anomaly": True}),
    Row("deterministic", trainer={"deterministic": True}),
    Row("profiler", trainer={"profiler": "simple"}),
    Row("one batch", train=lambda: train_loader(num_samples=6, batch_size=2), kill=False, differs={}),
]
