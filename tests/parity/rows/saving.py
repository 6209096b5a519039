"""Checkpoints."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from row import Net, Row, Run


def saves(*options: dict[str, Any]) -> Any:
    return lambda: [ModelCheckpoint(f"saved_{n}", **option) for n, option in enumerate(options)]


def and_load(run: Run) -> Any:
    run.fit()
    checkpoint = run.trainer.checkpoint_callback
    loaded = Net.load_from_checkpoint(checkpoint.best_model_path) if checkpoint.best_model_path else None
    path = checkpoint.best_model_path
    run.trainer.save_checkpoint("by_hand.ckpt")
    run.trainer.save_checkpoint("weights_only.ckpt", weights_only=True)
    return path.rsplit("/", 1)[-1], loaded is not None and torch.stack([p.sum() for p in loaded.parameters()]).sum()


class SavesAnError(Net):
    """Puts more into the checkpoint, and takes it out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = torch.arange(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint.pop("mine").tolist() == [0, 1, 2]


EARLY = {"step": 2, "point": "forward"}
ROWS = [
    Row("top two and last", callbacks=saves({"monitor": "val_loss", "save_top_k": 2, "save_last": True})),
    Row("all of a metric", callbacks=saves({"monitor": "loss_epoch", "save_top_k": -1, "mode": "max"})),
    Row("every train steps", callbacks=saves({"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"})),
    Row("every epochs", callbacks=saves({"every_n_epochs": 2, "save_top_k": -1}), trainer={"max_epochs": 3}),
    Row("by time", callbacks=saves({"train_time_interval": timedelta(hours=1), "save_last": True})),
    Row("at the end of training epochs", callbacks=saves({"save_on_train_epoch_end": True, "save_last": "link"})),
    Row("weights only", callbacks=saves({"save_weights_only": True})),
    Row("on exception", callbacks=saves({"save_on_exception": True})),
    Row("several at once", callbacks=saves({"every_n_train_steps": 3}, {"monitor": "val_loss", "mode": "min"}, {})),
    Row("no checkpoints", trainer={"enable_checkpointing": False}),
    Row("loaded and saved by hand", callbacks=saves({"monitor": "val_loss"}), calls=and_load, kill=EARLY),
    Row("hooks of the module", SavesAnError, kill=EARLY),
]
