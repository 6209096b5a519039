from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ft.callbacks import AsyncCheckpoint
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.strategies.sharding import ReplicaSharding


def test_nobody_claims_to_save_on_an_exception_what_no_rank_has(tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path / "a", save_on_exception=True),
        AsyncCheckpoint(tmp_path / "b", save_on_exception=True),
        ModelCheckpoint(tmp_path / "c", every_n_train_steps=7),
    ]
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_progress_bar=False)
    with pytest.warns(
        UserWarning, match=r"save_on_exception=True.* is switched off by `FTStrategy\(shard_size=2\)`"
    ) as told:
        ReplicaSharding(2, ShardingOptions()).cancel_saves_on_exceptions(trainer)
    assert len(told) == 2
    assert not any(callback.save_on_exception for callback in trainer.checkpoint_callbacks)
