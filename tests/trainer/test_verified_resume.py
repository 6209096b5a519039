"""Resuming from directories on a single device; with several ranks it is in test_resuming_ranks.py."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.checkpoint.export import export_checkpoint
from lightning_ft.errors import DamagedCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Model(LightningModule):
    def __init__(self, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def make_trainer(directory: Path, max_epochs: int, *callbacks: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator))
    return DataLoader(data, batch_size=8)


def fit(
    directory: Path, max_epochs: int, hyper_parameters: dict[str, Any] | None = None, **options: Any
) -> tuple[Model, Trainer]:
    """Train with a checkpoint each epoch; ``options`` are those of `fit`, and of the callback."""
    seed_everything(3, verbose=False)
    asked = {name: options.pop(name) for name in ("ckpt_path", "weights_only") if name in options}
    options = {"dirpath": directory / "checkpoints", "save_top_k": -1, "filename": "{epoch}", **options}
    trainer = make_trainer(directory, max_epochs, AsyncCheckpoint(**options))
    model = Model(**(hyper_parameters or {}))
    trainer.fit(model, loader(), loader(), **asked)
    return model, trainer


def assert_equal(one: Model, other: Model) -> None:
    for (name, value), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    (mine,), (its,) = one.trainer.optimizers, other.trainer.optimizers
    for state, expected in zip(mine.state_dict()["state"].values(), its.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert mine.param_groups[0]["lr"] == its.param_groups[0]["lr"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(tmp_path_factory.mktemp("uninterrupted"), 4)[0]


def damage(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize("how", ["path", "last", "auto", "best"])
def test_a_fit_resumes_from_a_directory_bit_for_bit(tmp_path: Path, uninterrupted: Model, how: str) -> None:
    _, first = fit(tmp_path, 2)
    newest = tmp_path / "checkpoints" / "epoch=1.ckpt"
    assert first.checkpoint_callback.best_model_path == str(newest)
    if how == "best":  # in the same Trainer: nobody else knows which one it was
        first.fit_loop.max_epochs = 4
        model = Model()
        first.fit(model, loader(), loader(), ckpt_path="best")
        trainer = first
    else:
        options: dict[str, Any] = {"path": {"ckpt_path": newest}, "last": {"ckpt_path": "last"}, "auto": {"resume": "auto"}}[
            how
        ]
        model, trainer = fit(tmp_path, 4, **options)
    assert trainer.global_step == 16
    assert_equal(model, uninterrupted)


@pytest.mark.parametrize("options", [{"ckpt_path": "last"}, {"resume": "auto"}], ids=["last", "auto"])
def test_where_the_newest_is_damaged_the_one_before_is_used(
    tmp_path: Path, uninterrupted: Model, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, 3)
    damage(tmp_path / "checkpoints" / "epoch=2.ckpt")
    (tmp_path / "checkpoints" / "epoch=1.ckpt" / "meta.pt").unlink()
    model, trainer = fit(tmp_path, 4, **options)
    assert "epoch=2.ckpt: __0_0.distcp has another content" in caplog.text
    assert "epoch=1.ckpt: meta.pt is missing" in caplog.text
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "epoch=0.ckpt")
    assert_equal(model, uninterrupted)


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error_before_anything_is_touched(tmp_path: Path) -> None:
    model, trainer = fit(tmp_path, 2)
    newest = tmp_path / "checkpoints" / "epoch=1.ckpt"
    damage(newest)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DamagedCheckpointError, match=r"epoch=1\.ckpt is damaged.*Still intact: .*epoch=0\.ckpt"):
        trainer.fit(model, loader(), loader(), ckpt_path=newest)
    with pytest.raises(DamagedCheckpointError, match="Still intact"):
        trainer.validate(model, loader(), ckpt_path="best")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    damage(tmp_path / "checkpoints" / "epoch=0.ckpt")
    with pytest.raises(DamagedCheckpointError, match="none beside it is intact either"):
        trainer.validate(model, loader(), ckpt_path="last")
    with pytest.raises(FileNotFoundError, match="not found"):
        trainer.validate(model, loader(), ckpt_path=tmp_path / "none.ckpt")


def test_evaluation_loads_directories_by_every_name(tmp_path: Path) -> None:
    model, trainer = fit(tmp_path, 2, monitor="val_loss", save_top_k=1)
    expected = trainer.validate(model, loader(), verbose=False)
    for name in ("last", "best", trainer.checkpoint_callback.best_model_path):
        other = (
            make_trainer(tmp_path, 2, AsyncCheckpoint(dirpath=tmp_path / "checkpoints", filename="{epoch}"))
            if name != "best"
            else trainer
        )
        assert other.validate(Model(), loader(), ckpt_path=name, verbose=False) == expected


def test_a_fresh_start_is_one_whatever_lies_about(tmp_path: Path, uninterrupted: Model) -> None:
    (tmp_path / "checkpoints" / ".tmp-epoch=0.ckpt-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".trash-epoch=0.ckpt-1").mkdir()
    model, trainer = fit(tmp_path, 4, resume="auto")
    assert trainer.ckpt_path is None
    assert_equal(model, uninterrupted)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


def test_a_second_fit_of_a_trainer_goes_on_from_where_it_is(tmp_path: Path) -> None:
    model, trainer = fit(tmp_path, 2, resume="auto")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader(), loader())
    assert (trainer.ckpt_path, trainer.global_step) == (None, 16)


def test_what_a_kill_left_to_be_removed_is_removed_at_the_next_start_and_nothing_elsewhere(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "checkpoints"
    fit(tmp_path / "a", 1)
    shutil.copytree(kept / "epoch=0.ckpt", tmp_path / "copy")
    fit(tmp_path / "a", 2, save_top_k=1, resume="auto")
    assert os.listdir(kept) == ["epoch=1.ckpt"]
    shutil.copytree(tmp_path / "copy", kept / "epoch=0.ckpt")  # as if it had been killed before it removed that one
    fit(tmp_path / "b", 3, ckpt_path=kept / "epoch=1.ckpt")  # another run, which reads here
    assert sorted(os.listdir(kept)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    damage(kept / "epoch=1.ckpt")
    fit(tmp_path / "a", 1, resume="auto")  # what replaces it is not there
    assert sorted(os.listdir(kept)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    damage(kept / "epoch=1.ckpt")  # the same bit again
    fit(tmp_path / "a", 2, resume="auto")
    assert sorted(os.listdir(kept)) == ["epoch=1.ckpt"]


def test_what_a_kill_left_to_be_removed_in_another_directory_is_removed_too(tmp_path: Path) -> None:
    root, options = tmp_path / "checkpoints", {"filename": "{epoch}/model", "save_top_k": 1, "resume": "auto"}
    fit(tmp_path, 1, **options)
    shutil.copytree(root / "epoch=0" / "model.ckpt", tmp_path / "copy")
    fit(tmp_path, 2, **options)
    shutil.copytree(tmp_path / "copy", root / "epoch=0" / "model.ckpt")
    shutil.copytree(tmp_path / "copy", tmp_path / "model.ckpt")
    fit(tmp_path, 2, **options)
    assert [path.parent.name for path in root.rglob("model.ckpt")] == ["epoch=1"]
    assert (tmp_path / "model.ckpt").exists()


def test_single_files_are_verified_and_resumed_from_too(tmp_path: Path, uninterrupted: Model) -> None:
    seed_everything(3, verbose=False)
    model = Model()
    trainer = make_trainer(tmp_path, 2, ModelCheckpoint(tmp_path / "checkpoints", filename="{epoch}", save_top_k=-1))
    trainer.fit(model, loader(), loader())
    newest = tmp_path / "checkpoints" / "epoch=1.ckpt"
    model, _ = fit(tmp_path, 4, resume="auto", dirpath=tmp_path / "checkpoints")
    assert_equal(model, uninterrupted)
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(DamagedCheckpointError, match=r"cut off or damaged.*Still intact: .*epoch=\d\.ckpt"):
        fit(tmp_path, 4, ckpt_path=newest)


def test_objects_in_hyper_parameters_need_the_users_consent_and_get_it(tmp_path: Path, uninterrupted: Model) -> None:
    hyper_parameters = {"where": Path("data"), "what": json.JSONDecoder}
    fit(tmp_path, 2, hyper_parameters)
    with pytest.raises(Exception, match="Pass `weights_only=False` to the Trainer call"):
        fit(tmp_path, 4, resume="auto")
    model, _ = fit(tmp_path, 4, hyper_parameters, resume="auto", weights_only=False)
    assert_equal(model, uninterrupted)


def test_resume_takes_auto_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`AsyncCheckpoint\\(resume='last'\\)` is not valid"):
        AsyncCheckpoint(resume="last")  # type: ignore[arg-type]


def test_an_exported_file_loads_without_anything_of_ours(tmp_path: Path, uninterrupted: Model) -> None:
    fit(tmp_path, 2)
    export_checkpoint(tmp_path / "checkpoints" / "epoch=1.ckpt", tmp_path / "out.ckpt")
    seed_everything(3, verbose=False)
    model = Model()
    trainer = make_trainer(tmp_path, 4)
    trainer.fit(model, loader(), loader(), ckpt_path=tmp_path / "out.ckpt")
    assert_equal(model, uninterrupted)
    loaded = Model.load_from_checkpoint(tmp_path / "out.ckpt")
    assert not torch.equal(loaded.net[0].weight, model.net[0].weight)
    assert torch.equal(loaded.net[0].weight, torch.load(tmp_path / "out.ckpt")["state_dict"]["net.0.weight"])


def test_fits_that_resume_by_themselves_leave_no_more_checkpoints_than_one_fit(tmp_path: Path) -> None:
    for max_epochs, options in ((1, {}), (2, {"resume": "auto"}), (3, {"ckpt_path": "last"})):
        fit(tmp_path, max_epochs, **{"save_top_k": 1, **options})
        assert os.listdir(tmp_path / "checkpoints") == [f"epoch={max_epochs - 1}.ckpt"]
    fit(tmp_path, 4, save_top_k=1, ckpt_path=tmp_path / "checkpoints" / "epoch=2.ckpt")  # which somebody wants to keep
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch=2.ckpt", "epoch=3.ckpt"]
