"""Bits that flip in the memory of a real rank: found after the same step, told by name, healed or excluded."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft.callbacks import ReplicaChecksums
from lightning_ft.testing import JobResult, run_job, run_without_supervisor

JOB = Path(__file__).parent / "jobs" / "corruption.py"


def holdings(directory: Path, name: str) -> dict[int, dict[tuple[int, int], set[str]]]:
    """What each process held after each step."""
    found: dict[int, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in directory.glob(f"{name}_*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["step"]][row["slot"], row["incarnation"]].add(row["digest"])
    return found


def told(job: JobResult) -> list[tuple[int, dict[str, list[str]], str]]:
    rows = [event for event in job.events if event["event"] == "corruption"]
    return [(row["step"], row["differing"], row["action"]) for row in rows]


def test_a_rank_with_a_flipped_bit_is_healed_at_once_then_excluded(tmp_path):
    weight, moment = "net.3.weight", "optimizer 0, exp_avg of net.3.weight"
    fits = {
        "clean": ([], {"every_n_train_steps": 1}),
        "healed": ([[1, 3, "weight"], [0, 5, "exp_avg"], [1, 6, "weight"]], {"every_n_train_steps": 1}),
        "stopped": ([[0, 3, "weight"]], {"every_n_train_steps": 3, "on_mismatch": "stop"}),
    }
    job = run_job(JOB, [json.dumps({"devices": 3, "fits": fits})], num_slots=3, directory=tmp_path)
    assert job.returncode != 0
    assert "CorruptedStateError: Replicas hold different states after step 3 (slot 0: net.3.weight" in job.stderr
    assert "they get what the others hold; what was trained since step 2 may have traces of it." in job.stderr
    assert (
        told(job)
        == [
            (3, {"1": [weight]}, "heal"),
            (5, {"0": [moment]}, "heal"),
            (6, {"1": [weight]}, "exclude"),  # once was chance
            *told(job)[3:],
        ]
    )
    assert [(step, action) for step, _, action in told(job)[3:]] == [(3, "stop")]
    clean, healed = holdings(tmp_path, "clean"), holdings(tmp_path, "healed")
    for step in range(1, 9):
        (right,) = set.union(*clean[step].values())
        if step < 6:  # healed before anything was computed with it
            assert all(healed[step][slot, 0] == {right} for slot in range(3))
        assert len(set.union(*healed[step].values())) == 1
    assert (1, 0) not in healed[7]
    assert {(0, 0), (2, 0)} <= healed[8].keys()


def test_a_shard_is_healed_by_those_who_hold_the_same_one(tmp_path):
    checks = {"every_n_train_steps": 2}
    fits = {"clean": ([], checks), "healed": ([[3, 2, "weight"], [0, 4, "exp_avg"]], checks)}
    options = {"devices": 6, "shard_size": 2, "fits": fits}
    job = run_job(JOB, [json.dumps(options)], num_slots=6, directory=tmp_path)
    job.check()
    assert [(step, list(differing), action) for step, differing, action in told(job)] == [
        (2, ["3"], "heal"),
        (4, ["0"], "heal"),
    ]
    clean, healed = holdings(tmp_path, "clean"), holdings(tmp_path, "healed")
    assert clean == healed
    assert len(set.union(*clean[8].values())) == 2  # shards


def test_under_ddp_a_rank_with_a_flipped_bit_is_healed(tmp_path):
    checks = {"every_n_train_steps": 2}
    fits = {"clean": ([], checks), "healed": ([[2, 4, "weight"]], checks)}
    options = {"devices": 3, "strategy": "ddp", "fits": fits}
    job = run_without_supervisor(JOB, [json.dumps(options)], num_ranks=3, directory=tmp_path)
    job.check()
    assert "after step 4 (slot 2: net.3.weight). Most ranks agree on another one." in job.stderr
    assert holdings(tmp_path, "clean") == holdings(tmp_path, "healed")


class FakeTrainer:
    """As much of a trainer as `setup` looks at."""

    num_devices, num_nodes = 2, 1

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


def test_where_it_cannot_work_it_says_so():
    with pytest.raises(ValueError, match=r"`ReplicaChecksums\(every_n_train_steps=0\)` is not valid"):
        ReplicaChecksums(0)
    with pytest.raises(ValueError, match=r"`ReplicaChecksums\(on_mismatch='ignore'\)` is not valid: expected one of 'heal'"):
        ReplicaChecksums(on_mismatch="ignore")
    with pytest.raises(MisconfigurationException, match=r"`FSDPStrategy` has none that it knows of"):
        ReplicaChecksums().setup(FakeTrainer(FSDPStrategy()), LightningModule(), "fit")
    with pytest.raises(MisconfigurationException, match="needs FTStrategy: elsewhere no rank can leave"):
        ReplicaChecksums(on_mismatch="exclude").setup(FakeTrainer(DDPStrategy()), LightningModule(), "fit")
    with pytest.warns(UserWarning, match="has nothing to compare on one device"):
        ReplicaChecksums().setup(Trainer(accelerator="cpu", devices=1, logger=False), LightningModule(), "fit")


def test_its_state_goes_on_in_a_rank_that_joins():
    one, other = ReplicaChecksums(), ReplicaChecksums()
    one._checked_step, one.agreed_step, one._healed = 300, 200, [1]
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
