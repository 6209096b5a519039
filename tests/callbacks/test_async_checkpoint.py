import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.reader import check
from lightning_ft.testing import Fault, FaultPlan, JobResult, run_job, run_without_supervisor

JOB = Path(__file__).parent / "jobs" / "saving.py"


def _digest(value: Any) -> str:
    spec = importlib.util.spec_from_file_location("saving", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest(value)


class Saving:
    """A run of ``jobs/saving.py``."""

    def __init__(self, directory: Path, job: JobResult) -> None:
        self.job, self.directory = job, directory
        paths = sorted(directory.glob("result_*.json"))
        self.results = [json.loads(path.read_text()) for path in paths]
        self.expected: dict[str, set[str]] = {}
        for path in directory.glob("expected_*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for name, digest in {line["path"]: line["digest"] for line in lines}.items():  # the last of each name
                self.expected.setdefault(name, set()).add(digest)

    def checkpoints(self, name: str = "saved") -> list[str]:
        return sorted(path.name for path in (self.directory / name).iterdir())

    def assert_each_is_what_was_saved(self, name: str = "saved") -> None:
        """Every checkpoint there is holds what all ranks had when they asked for it, and nothing else lies about."""
        for checkpoint in self.checkpoints(name):
            path = self.directory / name / checkpoint
            assert not checkpoint.startswith("."), "left over"
            check(str(path))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = read_checkpoint(path, weights_only=False)
            wanted = {key: loaded[key] for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")}
            assert self.expected[f"{name}/{checkpoint}"] == {_digest(wanted)}, checkpoint
        assert self.results
        for key in self.results[0]:
            assert len({json.dumps(result[key]) for result in self.results}) == 1, f"ranks differ in {key}"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Saving]:
    """Run ``jobs/saving.py``."""

    def run(plan: FaultPlan | None = None, *, timeout: float = 170.0, **options: Any) -> Saving:
        options = {"strategy": "auto", "devices": 1, **options}
        where: dict[str, Any] = {"directory": tmp_path, "timeout": timeout}
        if options["strategy"] == "FTStrategy" and options["devices"] > 1:
            job = run_job(JOB, [json.dumps(options)], num_slots=options["devices"], faults=plan, **where)
        else:
            job = run_without_supervisor(JOB, [json.dumps(options)], num_ranks=options["devices"], **where)
        return Saving(tmp_path, job)

    return run


def test_on_one_device_every_checkpoint_is_of_its_step_and_old_ones_go(run: Callable[..., Saving]) -> None:
    saving = run(
        average=True,
        callbacks=[
            {"dirpath": "saved", "every_n_train_steps": 5},
            {"dirpath": "best", "monitor": "val_loss", "save_top_k": 1, "save_last": "link"},
            {"dirpath": "newest", "every_n_train_steps": 1, "save_top_k": 1, "max_pending": 2, "save_last": True},
        ],
    )
    saving.job.check()
    assert saving.checkpoints() == sorted(f"step={step}.ckpt" for step in range(5, 49, 5))
    saving.assert_each_is_what_was_saved()
    saving.assert_each_is_what_was_saved("newest")
    assert saving.checkpoints("newest") == ["last.ckpt", "step=48.ckpt"]
    assert len(saving.checkpoints("best")) == 2
    assert (saving.directory / "best" / "last.ckpt").is_symlink()
    assert Path(saving.results[0]["best"][1]).is_dir()


@pytest.mark.parametrize("strategy", ["ddp", "ModelParallelStrategy", "FTStrategy"])
def test_under_strategies_with_several_ranks_they_divide_the_writing(run: Callable[..., Saving], strategy: str) -> None:
    savers: list[dict[str, Any]] = [{"dirpath": "saved", "every_n_train_steps": 3}]
    if strategy != "ModelParallelStrategy":  # by a value that each rank has of its own
        best = {
            "filename": "{step}-{own:.5f}",
            "monitor": "own",
            "save_top_k": 1,
            "save_last": True,
            "every_n_train_steps": 2,
        }
        savers.append({"dirpath": "best", **best})
    saving = run(strategy=strategy, devices=2, max_epochs=1, callbacks=savers)
    saving.job.check()
    if len(savers) == 2:
        saving.assert_each_is_what_was_saved("best")
        assert len(saving.checkpoints("best")) == 2
    assert saving.checkpoints() == ["step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    saving.assert_each_is_what_was_saved()
    manifest = Manifest.from_bytes((saving.directory / "saved" / "step=12.ckpt" / "manifest.json").read_bytes())
    sizes = {file.path: file.size for file in manifest.files}
    assert min(sizes["__0_0.distcp"], sizes["__1_0.distcp"]) > 2000
    assert manifest.world_size == 2
    if strategy == "FTStrategy":
        saving.assert_each_is_what_was_saved("final")
        assert saving.checkpoints("final") == ["end.ckpt"]


def test_deaths_of_ranks_leave_whole_checkpoints_and_what_they_kept_from_being_saved_is_saved_again(
    run: Callable[..., Saving],
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="save_checkpoint", step=6),
            Fault(kind="kill", slot=0, point="save_checkpoint", step=12, occurrence=1),
        ]
    )
    saving = run(
        plan, strategy="FTStrategy", devices=3, max_epochs=3, callbacks=[{"dirpath": "saved", "every_n_train_steps": 2}]
    )
    saving.job.check()
    saving.assert_each_is_what_was_saved()
    steps = {int(name.removeprefix("step=").removesuffix(".ckpt")) for name in saving.checkpoints()}
    assert {2, 4, 8, 10} <= steps
    assert len(steps) >= 10
