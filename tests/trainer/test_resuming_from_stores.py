"""Trainers that save in stores and resume from there; S3 is a real server."""

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy
from lightning_ft.callbacks import AsyncCheckpoint
from lightning_ft.checkpoint.dcp_reading import content_directory
from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.reader import candidates
from lightning_ft.checkpoint.store_path import StorePath
from lightning_ft.checkpoint.verify import damage
from lightning_ft.errors import DamagedCheckpointError
from lightning_ft.testing import Fault, FaultPlan, JobResult, assert_recovered, assert_used_up, run_job

SCRIPT = Path(__file__).parent / "jobs" / "resuming.py"
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore::FutureWarning")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index,unused-ignore]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SoloModelParallelStrategy(ModelParallelStrategy):
    """Leaves no process group to the next test."""

    def teardown(self) -> None:
        super().teardown()
        torch.distributed.destroy_process_group()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator))
    return DataLoader(data, batch_size=8)


def fit(
    directory: Path, max_epochs: int, *callbacks: Any, ckpt_path: Any = None, strategy: Any = "auto"
) -> tuple[Model, Trainer]:
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        strategy=strategy,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return model, trainer


def plain(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_equal(one: Model, other: Model) -> None:
    assert all(torch.equal(plain(value), plain(other.state_dict()[name])) for name, value in one.state_dict().items())
    (mine,), (its,) = one.trainer.optimizers, other.trainer.optimizers
    for state, expected in zip(mine.state_dict()["state"].values(), its.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(plain(state[name]), plain(expected[name])) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(tmp_path_factory.mktemp("uninterrupted"), 3)[0]


def names(dirpath: str) -> set[str]:
    return {StorePath(candidate.path).name for candidate in candidates(dirpath)}


@pytest.mark.parametrize(
    ("how", "where"), [("path", "memory"), ("best", "memory"), ("last", "memory"), ("last", "s3"), ("auto", "s3")]
)
def test_a_fit_resumes_from_a_store_bit_for_bit(
    tmp_path: Path, uninterrupted: Model, how: str, where: str, request: pytest.FixtureRequest
) -> None:
    bucket = request.getfixturevalue("bucket") if where == "s3" else f"memory://{tmp_path.name}"
    options: dict[str, Any] = {"dirpath": f"{bucket}/run", "filename": "{epoch}", "monitor": "epoch", "mode": "max"}
    options |= {"save_last": True, "save_top_k": 1}
    _, first = fit(tmp_path, 2, AsyncCheckpoint(**options))
    assert names(f"{bucket}/run") == {"epoch=1.ckpt", "last.ckpt"}
    best = f"{bucket}/run/epoch=1.ckpt"
    assert first.checkpoint_callback.best_model_path == best
    if how == "best":
        first.fit_loop.max_epochs = 3
        model, trainer = Model(), first
        trainer.fit(model, loader(), loader(), ckpt_path="best")
    else:
        path = {"path": best, "last": "last", "auto": None}[how]
        again = AsyncCheckpoint(**options, resume="auto" if how == "auto" else None)
        model, trainer = fit(tmp_path, 3, again, ckpt_path=path)
    assert trainer.global_step == 12
    assert_equal(model, uninterrupted)
    kept = {"epoch=1.ckpt"} if how in ("path", "best") else set()  # whose path was given
    assert names(f"{bucket}/run") == {"epoch=2.ckpt", "last.ckpt"} | kept
    assert {path.name for path in tmp_path.iterdir()} == set()


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, FTStrategy, SoloModelParallelStrategy])
def test_a_resumption_reads_a_store_once_where_there_is_room_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: type[Strategy]
) -> None:
    opened: list[str] = []
    really_open = StorePath.open
    monkeypatch.setattr(
        StorePath, "open", lambda self, *args, **how: opened.append(self.name) or really_open(self, *args, **how)
    )
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    store = f"memory://{tmp_path.name}/run"
    whole, _ = fit(tmp_path, 3, ModelCheckpoint(tmp_path / "whole"), strategy=strategy())
    fit(tmp_path, 2, AsyncCheckpoint(store), strategy=strategy())
    (saved,) = candidates(store)
    for free, times in ((1 << 40, 1), (0, 2)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(0, 0, free))
        opened.clear()
        resumed, trainer = fit(tmp_path, 3, AsyncCheckpoint(tmp_path / "b"), ckpt_path=saved.path, strategy=strategy())
        assert (trainer.global_step, trainer.ckpt_path) == (12, saved.path)
        assert_equal(resumed, whole)
        assert (opened.count("__0_0.distcp"), opened.count("meta.pt")) == (times, times)
        assert list((tmp_path / "copies").iterdir()) == []


def test_a_fit_that_goes_on_elsewhere_leaves_alone_what_it_came_from(tmp_path: Path, bucket: str) -> None:
    fit(tmp_path, 1, AsyncCheckpoint(f"{bucket}/a"))
    (old,) = candidates(f"{bucket}/a")
    fit(tmp_path, 2, AsyncCheckpoint(f"{bucket}/b"), ckpt_path=old.path)
    assert damage(old.path) is None
    assert len(names(f"{bucket}/b")) == 1
    (content_directory(StorePath(old.path)) / "meta.pt").write_bytes(b"?")
    with pytest.raises(DamagedCheckpointError, match=r"meta\.pt has 1 bytes"):
        fit(tmp_path, 2, AsyncCheckpoint(f"{bucket}/c"), ckpt_path=old.path)


def test_save_checkpoint_makes_a_directory_or_a_file_of_a_store_and_an_address_of_a_file_is_a_path(
    tmp_path: Path, bucket: str
) -> None:
    model, trainer = fit(tmp_path, 1, AsyncCheckpoint(f"file://{tmp_path}/saved"), strategy=FTStrategy())
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=4.ckpt"]
    paths = f"{bucket}/a.ckpt/", f"{bucket}/b.ckpt", f"file://{tmp_path}/c.ckpt/", f"file://{tmp_path}/d.ckpt"
    for path in paths:
        trainer.save_checkpoint(path)
    assert (tmp_path / "c.ckpt").is_dir()
    assert (tmp_path / "d.ckpt").is_file()
    assert [StorePath(path).is_dir() for path in paths[:2]] == [True, False]
    for path in paths:
        other, resumed = fit(tmp_path, 1, ModelCheckpoint(tmp_path / "other"), ckpt_path=path, strategy=FTStrategy())
        assert resumed.global_step == 4
        assert_equal(other, model)


def train(directory: Path, *, succeeds: bool = True, faults: FaultPlan | None = None, **options: Any) -> JobResult:
    directory.mkdir(exist_ok=True)
    for path in directory.glob("result_*.json"):  # a rank that is not back before the end leaves none
        path.unlink()
    job = run_job(SCRIPT, [json.dumps(options)], num_slots=2, directory=directory, faults=faults, timeout=200.0)
    assert (job.returncode == 0) == succeeds, job.tail()
    return job


def ends(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text())["end"] for path in sorted(directory.glob("result_*.json"))]
    return [{name: end[name] for name in ("weights", "moments", "lr", "global_step")} for end in found]


def test_a_job_killed_while_it_saves_in_a_store_goes_on_bit_for_bit_and_does_not_mind_a_death(
    tmp_path: Path, bucket: str
) -> None:
    options: dict[str, Any] = {"strategy": "ft", "devices": 2}
    saving = {"every_n_train_steps": 1, "resume": "auto", "timeout": 60}
    train(tmp_path / "truth", **options, checkpoint={**saving, "every_n_train_steps": 100})
    saving |= {"dirpath": f"{bucket}/run", "save_top_k": 3, "monitor": "step", "mode": "max"}
    at_once = [Fault(kind="kill", slot=slot, point="save_checkpoint", step=7) for slot in (0, 1)]
    train(tmp_path / "run", **options, checkpoint=saving, faults=FaultPlan(at_once), succeeds=False, ft={"max_restarts": 0})
    there = {candidate.path: damage(candidate.path) for candidate in candidates(f"{bucket}/run")}
    assert there
    assert set(there.values()) == {None}
    train(tmp_path / "run", **options, checkpoint=saving)
    assert ends(tmp_path / "run") == ends(tmp_path / "truth")
    assert names(f"{bucket}/run") == {"step=16.ckpt", "step=17.ckpt", "step=18.ckpt"}
    kept = {entry.path.name for entry in StorePath(f"{bucket}/run").entries()}
    assert kept == names(f"{bucket}/run")  # nothing is left of the save that was under way

    plan = FaultPlan([Fault(kind="kill", slot=0, point="save_checkpoint", step=21)])
    job = train(tmp_path / "run", **options, checkpoint=saving, faults=plan, max_epochs=3)
    assert_used_up(plan, job.events)
    assert_recovered(job.events)
    (newest, *_) = candidates(f"{bucket}/run")
    assert damage(newest.path) is None
    end, *others = ends(tmp_path / "run")
    assert others in ([], [end])
    held = {name: value.flatten().tolist() for name, value in read_checkpoint(newest.path)["state_dict"].items()}
    assert (held, newest.step) == (end["weights"], end["global_step"])
