"""Several Trainer calls and several Trainers in one script, with what they return."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from row import Net, Row, Run, train_loader, val_loader


class Writer(BasePredictionWriter):
    """Writes a rank's predictions into files of its own."""

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        Path(f"predicted_{trainer.global_rank}_{batch_idx}.txt").write_text(f"{batch_indices} {prediction.tolist()}")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        Path(f"predicted_{trainer.global_rank}.txt").write_text(f"{batch_indices} {len(predictions)}")


def every_call(run: Run) -> Any:
    run.fit()
    trainer, module = run.trainer, run.module
    return [
        trainer.validate(module, run.val, verbose=False),
        trainer.test(module, val_loader(seed=3), verbose=False),
        trainer.predict(module, val_loader(seed=4)),
        trainer.global_step,
    ]


def best_and_last(run: Run) -> Any:
    run.fit()
    trainer = run.trainer
    return [
        trainer.validate(dataloaders=run.val, ckpt_path="best", verbose=False),
        trainer.test(dataloaders=val_loader(seed=3), ckpt_path="last", verbose=False),
        trainer.predict(dataloaders=[val_loader(seed=4), val_loader(seed=5)], ckpt_path="best"),
    ]


def fit_again(run: Run) -> Any:
    run.fit()
    run.trainer.fit_loop.max_epochs = 4
    run.fit()
    return run.trainer.global_step


def fit_from_last(run: Run) -> Any:
    run.fit()
    second = run.make_trainer(max_epochs=4)
    second.fit(run.module, run.train, run.val, ckpt_path=run.trainer.checkpoint_callback.last_model_path)
    return second.global_step, second.current_epoch


def two_trainers(run: Run) -> Any:
    run.fit()
    second = run.make_trainer(max_epochs=1, limit_train_batches=3)
    second.fit(Net(), train_loader(shuffle=False), val_loader(seed=3))
    return second.global_step, second.test(dataloaders=val_loader(seed=4), verbose=False)


def goes_on_with_results(run: Run) -> Any:
    """A rank that comes back in the last call passes over the others, and its script needs what they left."""
    run.fit()
    trainer = run.trainer
    score = trainer.checkpoint_callback.best_model_score
    module = Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    loss = trainer.validate(module, run.val, verbose=False)[0]["val_loss"]
    run.trainer = run.make_trainer(max_epochs=3)
    run.trainer.fit(module, run.train, run.val)
    return score, loss, trainer.callback_metrics["val_loss"], trainer.global_step


def validate_first(run: Run) -> Any:
    before = run.trainer.validate(run.module, run.val, verbose=False)
    run.fit()
    return before, run.trainer.validate(run.module, run.val, verbose=False)


def without_results(run: Run) -> Any:
    run.fit()
    return run.trainer.predict(run.module, val_loader(seed=4), return_predictions=False)


def found_rate(run: Run) -> Any:
    found = Tuner(run.trainer).lr_find(run.module, run.train, run.val, num_training=6, early_stop_threshold=None)
    run.fit()
    return None if found is None else [found.results, run.module.lr]


def refused_batch_size(run: Run) -> Any:
    try:
        Tuner(run.trainer).scale_batch_size(run.module, run.train)
    except Exception as error:
        return type(error).__name__
    return None


class WithRate(Net):
    """Has a learning rate to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Grads(Net):
    """Needs gradients in evaluation."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss([inputs, batch[1]]), inputs)
        self.log("input_grad", gradient.norm(), sync_dist=True)


class EvaluationHooks(Callback):
    """Counts what evaluation calls."""

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        pl_module.log("from_callback", 1.0, on_epoch=True, reduce_fx="sum", sync_dist=True)


def with_gradients(run: Run) -> Any:
    return run.trainer.test(run.module, val_loader(seed=3), verbose=False)


def checkpoints(**options: Any) -> Any:
    return lambda: [ModelCheckpoint("saved", **options)]


EARLY = {"step": 2, "point": "forward"}
ROWS = [
    Row("every call", calls=every_call, kill=EARLY),
    Row("best and last", callbacks=checkpoints(monitor="val_loss", save_last=True), calls=best_and_last, kill=EARLY),
    Row("fit again", calls=fit_again, kill=EARLY),
    Row(
        "fit again from a checkpoint", callbacks=checkpoints(save_last=True), calls=fit_from_last, kill=EARLY, audited=False
    ),
    Row("two trainers", calls=two_trainers, kill=EARLY, audited=False),
    Row(
        "results of calls that were missed",
        callbacks=checkpoints(monitor="val_loss"),
        calls=goes_on_with_results,
        audited=False,
        alike=["returned"],
        kill={"step": None, "occurrence": 9, "point": "forward"},  # the first fit makes eight steps
    ),
    Row("validate first", calls=validate_first, kill=EARLY),
    Row("predictions are written", callbacks=lambda: [Writer("batch_and_epoch")], calls=every_call, kill=EARLY),
    Row("predictions are not returned", callbacks=lambda: [Writer("batch")], calls=without_results, kill=EARLY),
    Row(
        "gradients in evaluation",
        Grads,
        trainer={"inference_mode": False},
        callbacks=lambda: [EvaluationHooks()],
        calls=with_gradients,
        kill=False,
    ),
    Row("learning rate finder", WithRate, calls=found_rate, kill=EARLY),
    Row(
        "learning rate finder as callback",
        WithRate,
        callbacks=lambda: [LearningRateFinder(num_training_steps=6, early_stop_threshold=None)],
        kill={"step": 6, "point": "forward"},  # after the six steps of the search
    ),
    Row("batch size finder is refused", WithRate, calls=refused_batch_size, kill=False),
]
