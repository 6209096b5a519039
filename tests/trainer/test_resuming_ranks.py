"""Several ranks resume from directories: the same one on all of them, and on other strategies and numbers of ranks."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.testing import (
    Fault,
    FaultPlan,
    JobResult,
    assert_recovered,
    assert_used_up,
    run_job,
    run_without_supervisor,
)

SCRIPT = Path(__file__).parent / "jobs" / "resuming.py"


def train(directory: Path, faults: FaultPlan | None = None, **options: Any) -> tuple[list[dict[str, Any]], JobResult]:
    """Run the job; return what each rank saw. All that a rank must have alike is alike."""
    directory.mkdir(exist_ok=True)
    for path in directory.glob("result_*.json"):
        path.unlink()
    more: dict[str, Any] = {"directory": directory, "timeout": 120}
    if options["strategy"] == "ft":
        job = run_job(SCRIPT, [json.dumps(options)], num_slots=options["devices"], faults=faults, **more)
    else:
        job = run_without_supervisor(SCRIPT, [json.dumps(options)], num_ranks=options["devices"], **more)
    job.check()
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("result_*.json"))]
    assert len(results) == options["devices"]
    for result in results:
        assert result["end"] == results[0]["end"]
    return results, job


def damage(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 100)


def assert_starts_from(result: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    (optimizer,) = checkpoint["optimizer_states"]
    assert result["start"]["weights"] == {name: value.flatten().tolist() for name, value in checkpoint["state_dict"].items()}
    assert result["start"]["moments"] == [state["exp_avg"].flatten().tolist() for state in optimizer["state"].values()]
    assert result["start"]["lr"] == optimizer["param_groups"][0]["lr"]
    assert result["start"]["global_step"] == checkpoint["global_step"]


def test_a_job_resumes_mid_epoch_from_the_newest_intact_one_and_who_joins_later_does_not(tmp_path: Path) -> None:
    auto = {"dirpath": "checkpoints", "every_n_train_steps": 2, "resume": "auto"}
    (truth, *_), _ = train(tmp_path / "truth", strategy="ft", devices=3, checkpoint=auto)
    assert truth["end"]["global_step"] == 12

    place = tmp_path / "ft"
    train(place, strategy="ft", devices=3, checkpoint=auto, max_steps=5)
    damage(place / "checkpoints" / "step=4.ckpt")
    plan = FaultPlan([Fault(kind="kill", slot=1, point="validation_start", step=6)])
    results, job = train(place, plan, strategy="ft", devices=3, checkpoint=auto, ft={"min_replicas": 3})
    assert_used_up(plan, job.events)
    assert_recovered(job.events)
    assert results[0]["start"]["global_step"] == 2
    assert results[0]["end"]["ckpt_path"].endswith("checkpoints/step=2.ckpt")
    assert results[0]["end"]["attempt"] == 1  # on the rank that joined, too
    names = "ft/checkpoints/step=4-v1.ckpt", "truth/checkpoints/step=4.ckpt"
    mine, its = (read_checkpoint(tmp_path / name) for name in names)
    assert all(torch.equal(value, its["state_dict"][name]) for name, value in mine["state_dict"].items())
    assert job.stderr.count("Passed over checkpoint") == 1  # by rank 0, and by no rank that joins
    assert {path.name for path in (place / "checkpoints").glob("step=*")} >= {"step=2.ckpt", "step=12.ckpt"}


def test_other_strategies_and_numbers_of_ranks_go_on_from_a_directory(tmp_path: Path) -> None:
    place = tmp_path / "run"
    each_epoch = {"dirpath": str(place / "checkpoints"), "filename": "{epoch}", "every_n_epochs": 1}
    train(place, strategy="ft", devices=3, checkpoint=each_epoch, max_epochs=1)
    written = read_checkpoint(place / "checkpoints" / "epoch=0.ckpt")

    under_ddp, _ = train(place, strategy="ddp", devices=2, checkpoint=each_epoch, ckpt_path="last", validate=True)
    for result in under_ddp:
        assert_starts_from(result, written)
        assert result["validated"] == under_ddp[0]["validated"]
        assert result["end"]["best_model_path"] == str(place / "checkpoints" / "epoch=1.ckpt")
    damage(place / "checkpoints" / "epoch=1.ckpt")

    # Lightning's own, with nothing of ours in it, shards what was replicated.
    stock = {"strategy": "mps", "devices": 2, "callback": "lightning"}
    sharded, _ = train(
        tmp_path / "stock",
        **stock,
        checkpoint={"filename": "{epoch}"},
        ckpt_path=str(place / "checkpoints" / "epoch=0.ckpt"),
    )
    for result in sharded:
        assert_starts_from(result, written)
    assert torch.allclose(*(torch.tensor(run[0]["end"]["weights"]["net.0.weight"]) for run in (sharded, under_ddp)))

    # And back: what it wrote has no manifest.
    theirs = tmp_path / "stock" / "checkpoints" / "epoch=1.ckpt"
    assert sorted(path.name for path in theirs.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    options = {"dirpath": str(theirs.parent), "filename": "again-{epoch}", "resume": "auto"}
    (back, *_), _ = train(tmp_path / "back", strategy="ft", devices=2, checkpoint=options, max_epochs=3)
    assert_starts_from(back, read_checkpoint(theirs))
