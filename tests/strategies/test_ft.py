"""FTStrategy in one process: its arguments, and training on a single device."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ft import FTStrategy


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(row,) for row in torch.rand(10, 4)])


def data(shuffle=False):
    return DataLoader(TensorDataset(torch.arange(80.0).view(20, 4)), batch_size=3, shuffle=shuffle)


def run(tmp_path, strategy, **arguments):
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"devices": 1, "enable_checkpointing": False, **arguments},
    )
    module = Module()
    trainer.fit(module, data(shuffle=True), data())
    return trainer, module


@pytest.mark.parametrize("accumulate", [1, 2])
def test_single_device_computes_what_it_computes_under_ddp(tmp_path, accumulate):
    results = []
    for strategy in (FTStrategy(), "ddp"):
        trainer, module = run(tmp_path, strategy, accumulate_grad_batches=accumulate)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= trainer.test(module, data(), verbose=False)[0]
        predictions = torch.cat(trainer.predict(module, data()))
        results.append((metrics, [value.tolist() for value in module.state_dict().values()], predictions.tolist()))
    torch.distributed.destroy_process_group()
    assert results[0] == results[1]


def test_single_device_takes_streams(tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, strategy="ft", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Module(), DataLoader(Stream(), batch_size=2), DataLoader(Stream(), batch_size=2))
    assert trainer.global_step == 5


def test_several_ranks_within_pytest_are_refused_with_the_command_to_use(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"within pytest.*lightning-ft run -n 2 train.py.*devices=1"):
        run(tmp_path, FTStrategy(), devices=2)


def test_names_are_registered():
    assert {"ft", "lightning_ft.ftstrategy", "lightning_ft.strategies.ft.ftstrategy"} <= set(
        StrategyRegistry.available_strategies()
    )
