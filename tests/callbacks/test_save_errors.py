"""Storage that fails or is slow, in trainings within this process."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_ft.checkpoint.reader import candidates, check
from lightning_ft.checkpoint.store_path import StorePath
from lightning_ft.checkpoint.verify import read_manifest
from lightning_ft.errors import CheckpointNotCommittedError
from lightning_ft.testing.processes import children

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore::FutureWarning")


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("score", float(batch_idx % 4))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class At(Callback):
    """Does something before given batches; what is there then is noted."""

    def __init__(self, saver: AsyncCheckpoint, actions: dict[int, Callable[[int], None]]) -> None:
        self.saver, self.actions = saver, actions
        self.there: list[list[str]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        root = Path(str(self.saver.dirpath))
        self.there.append(names(root) if root.is_dir() else [])
        if batch_idx in self.actions:
            assert self.saver._saver is not None
            if batch_idx < 5:
                self.saver.finish_saves()
            pid = self.saver._saver.writer.pid
            assert pid is not None
            self.actions[batch_idx](pid)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if -1 in self.actions:
            assert self.saver._saver is not None
            assert self.saver._saver.writer.pid is not None
            self.actions[-1](self.saver._saver.writer.pid)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) if root.exists() else []


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def limit(size: int) -> Callable[[int], None]:
    return lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fit(saver: AsyncCheckpoint, root: Path, actions: dict[int, Callable[[int], None]], num_steps: int = 6) -> At:
    at = At(saver, actions)
    make_trainer(root, [at, saver], num_steps).fit(Regression(), data())
    return at


def make_trainer(root: Path, callbacks: list[Callback], num_steps: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        callbacks=callbacks,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)


def test_a_save_that_finds_the_disk_full_is_told_once_and_costs_no_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, save_last=True)
    fit(saver, tmp_path, {2: limit(2048), 4: limit(resource.RLIM_INFINITY)})
    told = [record.getMessage() for record in caplog.records if "was not committed" in record.getMessage()]
    for step in (3, 4):
        about = [line for line in told if f"The checkpoint of step {step} was not committed: rank 0 failed" in line]
        assert len(about) == 1  # though it was to be `last` too
        assert "Still intact: " in about[0]
    assert len(told) == 2
    assert names(tmp_path / "saved") == ["last.ckpt", "step=6.ckpt"]
    assert Path(saver.best_model_path).name == "step=6.ckpt"
    check(saver.best_model_path)
    assert [path.name for path in (tmp_path / "saved").iterdir() if path.name.startswith(".")] == []


def test_the_best_that_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, monitor="score", mode="max", save_top_k=2)
    fit(saver, tmp_path, {2: limit(2048)}, num_steps=4)
    assert names(tmp_path / "saved") == ["step=1.ckpt", "step=2.ckpt"]
    assert {Path(path).name: float(score) for path, score in saver.best_k_models.items()} == {
        "step=1.ckpt": 0.0,
        "step=2.ckpt": 1.0,
    }
    assert Path(saver.best_model_path).name == "step=2.ckpt"
    assert float(saver.best_model_score or 0) == 1.0
    assert Path(saver.kth_best_model_path).name == "step=1.ckpt"


@pytest.mark.parametrize("monitor", [None, "score"])
@pytest.mark.parametrize("num_failing", [1, 2])
def test_what_a_failed_save_was_to_replace_goes_with_the_next_one(
    tmp_path: Path, monitor: str | None, num_failing: int
) -> None:
    saver = AsyncCheckpoint(
        tmp_path / "saved", "{step}", every_n_train_steps=1, max_pending=3, save_top_k=1, monitor=monitor, mode="max"
    )
    fit(saver, tmp_path, {1: limit(2048), 1 + num_failing: limit(resource.RLIM_INFINITY)}, num_steps=4)
    assert names(tmp_path / "saved") == ["step=4.ckpt"]
    assert Path(saver.best_model_path).name == "step=4.ckpt"
    assert [Path(path).name for path in saver.best_k_models] == ([] if monitor is None else ["step=4.ckpt"])


def test_a_failed_save_ends_the_training_if_asked_to(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, on_save_error="raise")
    before = set(children(os.getpid()))
    with pytest.raises(
        CheckpointNotCommittedError, match=r"step 3 was not committed: .*file too large.* Still intact: .*step=2"
    ):
        fit(saver, tmp_path, {2: limit(2048)})
    assert names(tmp_path / "saved") == ["step=2.ckpt"]
    assert "writer_process" not in "".join(command_of(pid) for pid in set(children(os.getpid())) - before)


def test_a_training_asks_a_store_nothing_while_it_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"memory://{tmp_path.name}"
    asked: list[str] = []
    original = StorePath._asking

    def noted(path: StorePath) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.append(str(path))
        return original(path)

    class Stepping(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 0:
                monkeypatch.setattr(StorePath, "_asking", noted)

        def on_train_end(self, trainer: Trainer, *args: Any) -> None:
            monkeypatch.undo()

    StorePath(f"{root}/step=2.ckpt/somebody's").write_bytes(b"1")
    saver = AsyncCheckpoint(root, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True)
    trainer = make_trainer(tmp_path, [Stepping(), saver], 5)
    trainer.fit(Regression(), data())
    assert asked == []
    assert {StorePath(candidate.path).name for candidate in candidates(root)} == {"step=4.ckpt", "step=5.ckpt", "last.ckpt"}
    assert StorePath(f"{root}/step=2.ckpt/somebody's").exists()
    trainer = make_trainer(tmp_path, [AsyncCheckpoint(root, "{step}", every_n_train_steps=5)], 5)
    trainer.fit(Regression(), data())
    assert candidates(root)[0].path == f"{root}/step=5-v1.ckpt"


def test_a_slow_disk_never_leaves_less_than_what_was_there(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2, save_top_k=1)
    at = fit(saver, tmp_path, {2: lambda pid: os.kill(pid, signal.SIGSTOP), 5: lambda pid: os.kill(pid, signal.SIGCONT)})
    assert at.there[5] == ["step=2.ckpt"]  # step 4 is on its way since two batches
    assert names(tmp_path / "saved") == ["step=6.ckpt"]


def test_saves_that_would_wait_for_a_slow_disk_are_skipped_if_asked_to_but_not_the_last(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(
        tmp_path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True, when_busy="skip"
    )
    fit(saver, tmp_path, {2: lambda pid: os.kill(pid, signal.SIGSTOP), -1: lambda pid: os.kill(pid, signal.SIGCONT)})
    saved = {candidate.step for candidate in candidates(tmp_path / "saved")}
    assert saved >= {1, 3, 6}
    assert saved.isdisjoint({4, 5})
    for name in ("last.ckpt", "step=6.ckpt"):
        assert read_manifest(tmp_path / "saved" / name).step == 6


def test_a_directory_that_cannot_be_made_or_is_gone_fails_the_save_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)

    def block(pid: int) -> None:
        os.rename(tmp_path / "saved", tmp_path / "moved")
        (tmp_path / "saved").write_text("no directory")

    def unblock(pid: int) -> None:
        (tmp_path / "saved").unlink()

    fit(saver, tmp_path, {2: block, 3: unblock}, num_steps=5)
    assert names(tmp_path / "moved") == ["step=1.ckpt", "step=2.ckpt"]
    assert names(tmp_path / "saved") == ["step=4.ckpt", "step=5.ckpt"]
    assert "step 3 was not committed: rank 0 failed (not a directory: " in caplog.text
