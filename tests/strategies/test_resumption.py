"""Whose checkpoints can be resumed from within an epoch, and by which strategy."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ft import FTStrategy
from lightning_ft.strategies.resumption import name_positions


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index,unused-ignore]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(batch.float().unsqueeze(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def make_trainer(directory: Path, strategy: Any) -> Trainer:
    snapshots = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        callbacks=[snapshots],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(directory: Path, strategy: Any, ckpt: Path | None = None) -> Model:
    seed_everything(1, verbose=False)
    model = Model()
    loader: Any = DataLoader(range(20), batch_size=3, shuffle=True)  # type: ignore[arg-type]
    make_trainer(directory, strategy).fit(model, loader, ckpt_path=ckpt, weights_only=False)
    return model


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_every_strategy_resumes_from_the_middle_of_an_epoch_and_ours_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", FTStrategy())
    ckpt = tmp_path / "whole" / "step=9.ckpt"
    assert train(tmp_path / "ours", FTStrategy(), ckpt).seen == whole.seen[9:]
    for strategy in ("auto", "ddp", ModelParallelStrategy()):
        assert len(train(tmp_path / "other", strategy, ckpt).seen) == 14 - 9
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_data_of_another_kind_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    train(tmp_path, FTStrategy())
    path = tmp_path / "step=9.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    (position,) = checkpoint["loops"]["fit_loop"]["state_dict"]["elastic_loaders"]
    del position["num_slots"]
    torch.save(checkpoint, path)
    with pytest.raises(MisconfigurationException, match=r"a stream of each rank.*Resume with `lightning-ft run`"):
        train(tmp_path, FTStrategy(), path)


def test_position_of_another_strategy_s_loader_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop: Any = make_trainer(tmp_path, "auto").fit_loop
    name_positions(loop.trainer, is_solo=False)
    with caplog.at_level(logging.WARNING):
        loop.on_load_checkpoint({"combined_loader": [{"read": 3}]})
    assert loop._combined_loader_states_to_load == []
    assert "position of rank 0's loader" in caplog.text
