"""What users of Lightning report about checkpoints and resuming, with AsyncCheckpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.reader import candidates
from lightning_ft.checkpoint.verify import verify
from lightning_ft.testing import run_without_supervisor
from lightning_ft.trainer.verified_resume import VerifiedResume

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.validated: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.validated[self.trainer.global_step] = float(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-1)


def make_trainer(*callbacks: AsyncCheckpoint, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **{"max_epochs": 2, **quiet, **options})


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator)), 4)


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_everything(3, verbose=False)


def test_validation_right_after_a_save_sees_that_save(tmp_path: Path) -> None:
    model = Model()
    trainer = make_trainer(AsyncCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"))
    trainer.fit(model, loader(), loader())
    (expected,) = trainer.validate(model, loader(), verbose=False)
    for name in ("last", "best"):
        assert trainer.validate(Model(), loader(), ckpt_path=name, verbose=False) == [expected]
    other = make_trainer(AsyncCheckpoint(tmp_path))
    assert other.validate(Model(), loader(), ckpt_path="last", verbose=False) == [expected]


def test_checkpoints_of_a_step_and_of_an_epoch_with_one_name_are_two(tmp_path: Path) -> None:
    of_steps = AsyncCheckpoint(tmp_path, "same", every_n_train_steps=8, save_top_k=-1)
    of_epochs = AsyncCheckpoint(tmp_path, "same", every_n_epochs=1, save_top_k=-1)
    make_trainer(of_steps, of_epochs).fit(Model(), loader(), loader())
    found = candidates(tmp_path)
    assert sorted(Path(candidate.path).name for candidate in found) == ["same-v1.ckpt", "same.ckpt"]
    assert [candidate.step for candidate in found] == [16, 16]
    for candidate in found:
        verify(candidate.path)
        assert read_checkpoint(candidate.path)["global_step"] == candidate.step


def test_a_save_that_meets_a_validation_has_its_metric(tmp_path: Path) -> None:
    model = Model()
    best = AsyncCheckpoint(tmp_path, "{step}", monitor="val_loss", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(best, val_check_interval=4, num_sanity_val_steps=0)
    trainer.fit(model, loader(), loader())
    scores = {int(Path(path).stem.removeprefix("step=")): float(score) for path, score in best.best_k_models.items()}
    assert scores.keys() <= model.validated.keys()
    for path in best.best_k_models:
        verify(path)
    again = Model()
    make_trainer(AsyncCheckpoint(tmp_path)).validate(again, loader(), ckpt_path=best.best_model_path, verbose=False)
    saved = read_checkpoint(best.best_model_path)["global_step"]
    assert list(again.validated.values()) == [pytest.approx(model.validated[saved])]


def test_resuming_in_another_directory_leaves_the_first_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 4, "save_top_k": 1, "save_last": True}
    make_trainer(AsyncCheckpoint(tmp_path / "a", **options), max_epochs=1).fit(Model(), loader(), loader())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    last = tmp_path / "a" / "last.ckpt"
    other = AsyncCheckpoint(tmp_path / "b", **options)
    trainer = make_trainer(other)
    trainer.fit(Model(), loader(), loader(), ckpt_path=last)
    assert trainer.global_step == 16
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    assert sorted(os.listdir(tmp_path / "b")) == ["last.ckpt", "step=16.ckpt"]
    assert other.best_model_path == str(tmp_path / "b" / "step=16.ckpt")


def test_checkpoints_are_found_again_though_the_name_of_a_metric_makes_directories(tmp_path: Path) -> None:
    class Slashed(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val/loss", float(self.trainer.global_step))

    options: dict[str, Any] = {"monitor": "val/loss", "mode": "max", "save_top_k": 1, "resume": "auto"}
    first = AsyncCheckpoint(tmp_path, "{epoch}-{val/loss:.1f}", **options)
    make_trainer(first, max_epochs=1).fit(Slashed(), loader(), loader())
    assert first.best_model_path == str(tmp_path / "epoch=0-val" / "loss=8.0.ckpt")
    (tmp_path / "epoch=0-val" / ".tmp-loss=9.0.ckpt-x").mkdir()
    of_another = AsyncCheckpoint(tmp_path / "epoch=0-val" / "of-another-run", every_n_epochs=1)
    make_trainer(of_another).fit(Model(), loader(), loader())
    second = AsyncCheckpoint(tmp_path, "{epoch}-{val/loss:.1f}", **options)
    trainer = make_trainer(second)
    trainer.fit(Slashed(), loader(), loader())
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    assert trainer.global_step == 16
    assert VerifiedResume.of(trainer).chosen == first.best_model_path
    assert second.best_model_path == str(tmp_path / "epoch=1-val" / "loss=16.0.ckpt")
    assert os.listdir(tmp_path / "epoch=0-val") == ["of-another-run"]  # what is replaced goes, and what is left over
    trainer = make_trainer(AsyncCheckpoint(tmp_path, "{epoch}-{val/loss:.1f}"))
    trainer.validate(Model(), loader(), ckpt_path="last", verbose=False)
    assert VerifiedResume.of(trainer).chosen == second.best_model_path


def test_another_callback_that_would_save_under_the_same_names_is_refused(tmp_path: Path) -> None:
    other = ModelCheckpoint(tmp_path / "x" / "..", save_last=True)
    trainer = make_trainer(other, AsyncCheckpoint(tmp_path))  # type: ignore[arg-type]
    told = r"`AsyncCheckpoint` and `ModelCheckpoint` both save `\{epoch\}-\{step\}` in"
    with pytest.raises(MisconfigurationException, match=told):
        trainer.fit(Model(), loader(), loader())
    trainer = make_trainer(other, AsyncCheckpoint(tmp_path, "{step}"), max_epochs=1)  # type: ignore[arg-type]
    trainer.fit(Model(), loader(), loader())


def test_kills_and_resumes_leave_no_more_checkpoints_than_one_run(tmp_path: Path) -> None:
    job = Path(__file__).parent / "jobs" / "killed.py"
    saved = tmp_path / "saved"
    for step in (5, 11, 17):
        assert run_without_supervisor(job, [str(step)], num_ranks=1, directory=tmp_path).returncode == -9
        assert max(candidate.step for candidate in candidates(saved)) >= step - 2
        assert len(os.listdir(saved)) <= 4, "two under way beside the two that are there"
    run_without_supervisor(job, ["-1"], num_ranks=1, directory=tmp_path).check()
    assert os.listdir(saved) == ["step=24.ckpt"]
