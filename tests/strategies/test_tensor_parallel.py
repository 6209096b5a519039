"""A module that divides its layers among ranks learns in replicas what it learns whole, also if a rank of one dies."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft import FTStrategy
from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.strategies.sharding import resolve_shard_size
from lightning_ft.testing import Fault, FaultPlan, run_job
from tests.strategies.jobs import tensor_parallel

JOB = Path(tensor_parallel.__file__)


def train(directory: Path, devices: int, batch_size: int, **variants: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    request = [json.dumps({"devices": devices, "batch_size": batch_size, "variants": variants})]
    run_job(JOB, request, num_slots=devices, directory=directory, timeout=180.0).check()
    return {name: [torch.load(directory / f"{name}_{slot}.pt") for slot in range(devices)] for name in variants}


def assert_learned(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    for part in ("weights", "optimizer", "metrics", "val_loss"):
        torch.testing.assert_close(ours[part], truth[part], rtol=1e-5, atol=1e-5)
    assert (ours["step"], ours["batches"]) == (truth["step"], truth["batches"])


def test_replicas_whose_ranks_share_batches_learn_what_one_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train(
        tmp_path,
        4,
        3,
        replicas={"shard_size": 2, "save": "saved"},
        resumed={"shard_size": 2, "resume": "saved/step=18.ckpt"},
        sharded={"shard_size": 4, "net": {"shards": True}, "num_samples": 72},
        apart={"shard_size": 2, "apart": True, "net": {"on_meta": True, "dropout": 0.5}},
    )
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.chdir(tmp_path)
    truth = tensor_parallel.run("auto", 1, 6)
    even = tensor_parallel.run("auto", 1, 6, num_samples=72)
    for name, expected in (("replicas", truth), ("sharded", even)):
        for found in ours[name]:
            assert_learned(found, expected)
    saved = read_checkpoint(str(tmp_path / "saved" / "step=24.ckpt"), weights_only=True)
    torch.testing.assert_close(dict(saved["state_dict"]), dict(ours["replicas"][0]["weights"]), rtol=0.0, atol=0.0)
    torch.testing.assert_close(saved["optimizer_states"][0], ours["replicas"][0]["optimizer"], rtol=0.0, atol=0.0)
    for slot in range(4):  # not a bit differs from what was not interrupted
        assert ours["resumed"][slot]["fingerprint"] == ours["replicas"][slot]["fingerprint"]
    for ranks in ours.values():
        assert all(rank["fingerprint"] == ranks[0]["fingerprint"] for rank in ranks)
        for first, second in (ranks[:2], ranks[2:]):
            assert first["samples"] == second["samples"]
            assert first["losses"] == second["losses"]
        assert ranks[0]["losses"] != ranks[2]["losses"]
        trained = Counter(ranks[0]["samples"] + ranks[2]["samples"])
        assert sorted(ranks[0]["predicted"] + ranks[2]["predicted"]) == list(range(23))
        if ranks is not ours["resumed"]:
            assert set(trained) == set(range(max(trained) + 1))


def test_a_death_takes_its_replica_out_of_the_step_and_its_rows_come_back(train: Callable[..., Any]) -> None:
    points = ("backward_early", "validation_batch", "gradients_ready")
    faults = [
        Fault(kind="kill", slot=slot, point=point, step=step, incarnation=incarnation)
        for point, slot, step, incarnation in zip(points, (1, 2, 0), (5, 12, 15), (0, 0, 1), strict=True)
    ]
    plan = FaultPlan(faults)
    options = {"shard_size": 2, "tensor_parallel_size": 2, "min_replicas": 2}
    training = train(plan, devices=4, ft=options, model="InTensorParallel", dropout=0.2, clip=1.0)
    training.assert_went_on(plan)
    steps = {event["step"]: event["members"] for event in training.of("step")}
    assert (steps[6], steps[7]) == ([2, 3], [2, 3, 0, 1])


def test_the_only_replica_whose_ranks_share_batches_goes_on_from_its_newest_checkpoint(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="backward_early", step=8)])
    options = {"shard_size": "all", "tensor_parallel_size": 2}
    training = train(plan, devices=2, ft=options, model="InTensorParallel", every_n_train_steps=5)
    training.job.check()
    training.assert_ranks_agree()
    assert [(event["step"], event["path"][-11:]) for event in training.of("resumed")] == [(5, "step=5.ckpt")] * 2


def test_ranks_that_share_batches_and_have_different_numbers_of_them_are_told_so(tmp_path: Path) -> None:
    request = {"devices": 2, "batch_size": 3, "variants": {"differs": {"shard_size": 2, "differs": True}}}
    job = run_job(JOB, [json.dumps(request)], num_slots=2, directory=tmp_path, timeout=180.0)
    assert job.returncode == 1
    assert "different numbers of them in `trainer.validate`: [1.0] and [2.0] (slot 1)" in job.stderr


def test_sizes_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"tensor_parallel_size=2\)`: the 3 ranks of a replica can't be"):
        resolve_shard_size(3, 6, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        FTStrategy(2, tensor_parallel_size=0)
