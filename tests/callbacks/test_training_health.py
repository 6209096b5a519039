"""TrainingHealth in real trainings: on one device, under ``ddp``, and under FTStrategy while ranks die and return."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import cli
from lightning_ft.callbacks import LoaderPosition, TrainingHealth
from lightning_ft.errors import DiscontinuityError
from lightning_ft.testing import Fault, FaultPlan, JobResult, assert_used_up, run_job, run_without_supervisor

SCRIPT = Path(__file__).parent / "jobs" / "health.py"


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2048, 16, generator=generator)
    targets = (inputs @ torch.randn(16, 4, generator=generator)).tanh()
    return DataLoader(TensorDataset(inputs, targets + 0.3 * torch.randn(2048, 4, generator=generator)), batch_size=8)


def fit(
    health: TrainingHealth, steps: int, directory: Path, ckpt_path: Path | None = None, *callbacks: Any, **options: Any
) -> Trainer:
    seed_everything(3, verbose=False)
    options.setdefault("enable_checkpointing", False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[*([health] if health else []), LoaderPosition(), *callbacks],
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Model(), loader(), ckpt_path=ckpt_path)
    return trainer


def test_resumption_is_judged_by_the_steps_before_the_checkpoint(tmp_path):
    first = TrainingHealth()
    trainer = fit(first, 64, tmp_path)
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    assert first.verdicts == []
    unwatched = fit(None, 64, tmp_path).lightning_module.state_dict()
    assert all(torch.equal(weight, unwatched[name]) for name, weight in trainer.lightning_module.state_dict().items())
    second = TrainingHealth(on_discontinuity="stop")
    fit(second, 100, tmp_path, tmp_path / "good.ckpt")
    assert [str(verdict) for verdict in second.verdicts] == ["after the resume at step 64: continuous"]
    assert second.report()["ft/lost_restart"] > 0.0
    assert second.report()["ft/goodput"] < 1.0

    for name, factor, outcome in (("scaled", 20.0, "spike"), ("nan", math.nan, "nan")):
        checkpoint = torch.load(tmp_path / "good.ckpt", weights_only=False)
        for weight in checkpoint["state_dict"].values():
            weight.mul_(factor)
        torch.save(checkpoint, tmp_path / f"{name}.ckpt")
        third = TrainingHealth("stop")
        with pytest.raises(DiscontinuityError, match=f"did not go on as before after the resume at step 64: {outcome}"):
            fit(third, 100, tmp_path, tmp_path / f"{name}.ckpt")


def test_rollback_goes_on_from_the_newest_intact_checkpoint_before_the_restart(tmp_path):
    saving = {"enable_checkpointing": True}
    first = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=20, save_top_k=-1)
    fit(TrainingHealth(), 64, tmp_path, None, first, **saving)
    checkpoint = torch.load(tmp_path / "saved" / "step=60.ckpt", weights_only=False)
    for weight in checkpoint["state_dict"].values():
        weight.mul_(30.0)
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    os.truncate(tmp_path / "saved" / "step=60.ckpt", 2000)
    health = TrainingHealth("rollback")
    again = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=20, save_top_k=-1)
    trainer = fit(health, 130, tmp_path, tmp_path / "bad.ckpt", again, **saving)
    assert [str(verdict).partition(" (")[0] for verdict in health.verdicts] == [
        "after the resume at step 60: spike",
        "after the rollback at step 70: continuous",
    ]
    assert trainer.global_step == 130
    assert trainer.callback_metrics["loss"] < 0.5
    assert health.report()["ft/lost_recomputation"] > 0.0


def test_checkpoint_without_state_of_health_is_undecided_and_accumulation_counts_steps(tmp_path):
    fit(TrainingHealth(), 30, tmp_path).save_checkpoint(tmp_path / "bare.ckpt")
    checkpoint = torch.load(tmp_path / "bare.ckpt", weights_only=False)
    del checkpoint["callbacks"]["TrainingHealth"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    health = TrainingHealth(on_discontinuity="stop")
    fit(health, 60, tmp_path, tmp_path / "bare.ckpt", accumulate_grad_batches=2)
    assert [verdict.outcome for verdict in health.verdicts] == ["undecided"]


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`TrainingHealth\(on_discontinuity='ignore'\)` is not valid: expected one of"):
        TrainingHealth(on_discontinuity="ignore")
    with pytest.raises(ValueError, match=r"`TrainingHealth\(window=1\)` is not valid"):
        TrainingHealth(window=1)
    with pytest.raises(ValueError, match=r"`TrainingHealth\(flops_per_batch=-1\)` is not valid: expected a number greater"):
        TrainingHealth(flops_per_batch=-1)
    with pytest.raises(MisconfigurationException, match="needs a strategy that goes on without a rank"):
        fit(TrainingHealth(on_straggler="exclude"), 1, tmp_path)


def told(directory: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem[-1]): json.loads(path.read_text()) for path in sorted(directory.glob("health_*.json"))}


def logged(directory: Path) -> list[dict[str, str]]:
    (path,) = directory.glob("logs/version_0/metrics.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


def test_deaths_rejoins_and_stragglers_are_told_alike_by_all_ranks(tmp_path):
    plan = FaultPlan([Fault(kind="kill", slot=0, point="gradients_ready", step=45)])
    options = {"strategy": "ft", "devices": 3, "steps": 220, "slow": 2, "slow_from": 90, "save": True}
    options["health"] = {"on_straggler": "exclude", "on_discontinuity": "stop", "every_n_train_steps": 5}
    job = run_job(SCRIPT, [json.dumps(options)], num_slots=3, faults=plan, directory=tmp_path, timeout=300).check()
    assert_used_up(plan, job.events)
    ranks = told(tmp_path)
    verdicts = [event for event in job.events if event["event"] == "verdict"]
    texts = [f"after the {v['reason']} at step {v['step']}: {v['outcome']}" for v in verdicts]
    assert all(rank["verdicts"] == texts for rank in ranks.values())
    assert {verdict["outcome"] for verdict in verdicts} == {"continuous"}
    assert [verdict["reason"] for verdict in verdicts][:3] == ["death", "rejoin", "death"]
    assert verdicts[0]["step"] == 45
    straggler = next(event for event in job.events if event["event"] == "straggler")
    assert straggler["straggler"] == 2  # on a busy machine others may follow
    assert straggler["over_peers"] > 1.5
    excluded = next(
        event for event in job.events if event["event"] == "exit" and event["how"].startswith("excluded: slot 2")
    )
    assert excluded["slot"] == 2
    report = ranks[1]["report"]
    for kind in ("startup", "checkpoint", "missing"):
        assert report[f"ft/lost_{kind}"] > 0.0
    assert report["ft/goodput"] == pytest.approx(
        1.0 - sum(v for k, v in report.items() if k.startswith("ft/lost_")), abs=0.02
    )
    metrics = {event["step"]: event for event in job.events if event["event"] == "metrics"}
    assert sorted(metrics) == list(range(1, 221))
    assert all(event["loss"] > 0.0 and event["grad_norm"] > 0.0 for event in metrics.values())
    rows = [row for row in logged(tmp_path) if row["ft/goodput"]]
    assert len(rows) >= 15
    assert "last_fault=slot 0 @ 46" in job.stdout
    assert "goodput=" in job.stdout


def test_training_goes_back_on_all_ranks_and_stops_if_that_is_no_better(tmp_path):
    plan = FaultPlan([Fault(kind="kill", slot=1, point="gradients_ready", step=45)])
    options = {"strategy": "ft", "devices": 2, "steps": 400, "damaged": True, "save": True, "rich": True}
    options["health"] = {"on_discontinuity": "rollback"}
    job = run_job(SCRIPT, [json.dumps(options)], num_slots=2, faults=plan, directory=tmp_path, timeout=300)
    assert job.returncode != 0
    assert "DiscontinuityError" in job.stderr
    assert "did not go on as before after the rollback at step" in job.stderr
    verdicts = [event for event in job.events if event["event"] == "verdict"]
    outcomes = [(verdict["reason"], verdict["outcome"]) for verdict in verdicts]
    assert outcomes == [("death", "continuous"), ("rejoin", "spike"), ("rollback", "spike")]
    (back,) = [event for event in job.events if event["event"] == "taken_back"]
    assert back["to"] <= verdicts[1]["step"] < back["step"] == verdicts[2]["step"]
    assert back["to"] % 25 == 0
    assert told(tmp_path) == {}
    assert "last_fault: slot" in job.stdout
    assert "goodput: 0." in job.stdout


@pytest.mark.parametrize("strategy", ["ft", "model_parallel"])
def test_sharded_training_goes_back(tmp_path, strategy):
    options = {"strategy": strategy, "devices": 2, "steps": 70, "save": True, "ft": {"shard_size": 2}}
    options["health"] = {"on_discontinuity": "rollback"}

    def run(**more: Any) -> JobResult:
        arguments = [json.dumps({**options, **more})]
        if strategy == "ft":
            return run_job(SCRIPT, arguments, num_slots=2, directory=tmp_path, timeout=300).check()
        return run_without_supervisor(SCRIPT, arguments, num_ranks=2, directory=tmp_path, timeout=300).check()

    run()
    (newest,) = (tmp_path / "saved").glob("*step=50*")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["ckpt", "export", str(newest), str(tmp_path / "bad.ckpt")])
    checkpoint = torch.load(tmp_path / "bad.ckpt", weights_only=False)
    for weight in checkpoint["state_dict"].values():
        weight.mul_(30.0)
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    job = run(steps=120, ckpt_path="bad.ckpt")
    assert f"Going back to the weights of step 50, from {newest}" in job.stderr
    ranks = told(tmp_path)
    assert len(ranks) == 2
    for rank in ranks.values():
        verdicts = [verdict.partition(" (")[0] for verdict in rank["verdicts"]]
        assert verdicts[0] == "after the resume at step 50: spike"
        assert verdicts[1].startswith("after the rollback at step")
        assert verdicts[1].endswith(": continuous")
        assert rank["report"]["ft/loss"] < 0.5


def test_slow_forward_pass_of_a_rank_is_told_under_ddp(tmp_path):
    options = {"strategy": "ddp", "devices": 2, "steps": 60, "slow": 1, "slow_from": 10}
    options["health"] = {"every_n_train_steps": 4}
    job = run_without_supervisor(SCRIPT, [json.dumps(options)], num_ranks=2, directory=tmp_path, timeout=300).check()
    assert "Straggler: slot 1 takes 2" in job.stderr
    ranks = told(tmp_path)
    for name in ("ft/loss", "ft/grad_norm"):
        assert ranks[0]["report"][name] == ranks[1]["report"][name]
    assert 0.0 < ranks[0]["report"]["ft/mfu"] < 1.0
    assert float(logged(tmp_path)[-1]["ft/replicas"]) == 2.0
