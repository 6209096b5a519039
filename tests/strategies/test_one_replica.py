"""A module sharded over all ranks: one replica, which outlives its ranks by snapshots in memory."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.events.audit import audit
from lightning_ft.testing import Fault, FaultPlan, JobResult, assert_used_up, run_job

JOB = Path(__file__).parent / "jobs" / "one_replica.py"
NUM_SAMPLES = 96


def run(plan: FaultPlan, directory: Path, **options: Any) -> JobResult:
    job = run_job(JOB, [json.dumps(options)], num_slots=3, faults=plan, directory=directory, timeout=150.0)
    job.check()
    assert_used_up(plan, job.events)
    return job


def committed_steps(directory: Path) -> list[tuple[int, list[list[int]]]]:
    """The samples of each step that the training went on from, by batches, with its epoch."""
    records: list[dict[str, Any]] = []
    for path in directory.glob("steps_*.jsonl"):
        slot = int(path.stem.removeprefix("steps_"))
        records += [{**json.loads(line), "slot": slot} for line in path.read_text().splitlines()]
    records.sort(key=lambda record: record["time"])
    last = {record["step"]: record for record in records}
    assert sorted(last) == list(range(1, len(last) + 1))
    steps = []
    for step, final in sorted(last.items()):
        same = [r for r in records if r["step"] == step and r["members"] == final["members"]]
        by_slot = {record["slot"]: record["ids"] for record in same}
        assert set(by_slot) == set(final["members"]), step
        steps.append((final["epoch"], [ids for ids in by_slot.values() if ids]))
    return steps


def assert_equals_one_process(directory: Path, monkeypatch: pytest.MonkeyPatch, num_epochs: int) -> None:
    monkeypatch.syspath_prepend(str(JOB.parent))
    import one_replica

    steps = committed_steps(directory)
    for epoch in range(num_epochs):
        trained = Counter(index for of, batches in steps if of == epoch for ids in batches for index in ids)
        assert trained == Counter(range(NUM_SAMPLES)), f"epoch {epoch} did not train every sample once"
    expected = one_replica.train_in_one_process(steps)
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("result_*.json"))]
    assert results
    for result in results:
        assert result["step"] == len(steps)
        assert result["same"], "the parameters are other objects"
        assert result["placed"], "its shards are told to be those of another rank"
        assert result["metrics"] == results[0]["metrics"]
        for ours, theirs in zip(result["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-6)


def assert_only_the_newest_is_kept(directory: Path, *saved_to: str) -> None:
    """No checkpoint that was saved before a return to an earlier step was forgotten."""
    results = [json.loads(path.read_text()) for path in directory.glob("result_*.json")]
    for key, name in (("newest", f"step={results[0]['step']}.ckpt"), ("last", "last.ckpt")):
        expected = [str(directory / path / name) for path in saved_to]
        assert [result[key] for result in results] == [expected] * len(results)
    names = {f"step={results[0]['step']}.ckpt", "last.ckpt"}
    kept = [{path.name for path in (directory / path).glob("[!.]*")} for path in saved_to]  # a kill may leave trash
    assert kept == [names] * len(saved_to)


def assert_tested(directory: Path) -> None:
    """All ranks returned the loss of what was trained."""
    import one_replica

    net = one_replica.make_net()
    weights = json.loads((directory / "result_1.json").read_text())["weights"]
    _, inputs, targets = zip(*(one_replica.Samples()[index] for index in range(NUM_SAMPLES)), strict=True)
    with torch.no_grad():
        for parameter, trained in zip(net.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(trained))
        loss = torch.nn.functional.mse_loss(net(torch.stack(inputs)), torch.stack(targets)).item()
    tested = [json.loads(path.read_text())["test_loss"] for path in directory.glob("tested_*.json")]
    assert tested == [pytest.approx(loss, rel=1e-5)] * 3


def test_the_ranks_that_are_left_go_on_in_their_processes_and_those_that_return_take_their_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=2, point="gradients_ready", step=6),
            Fault(kind="kill", slot=0, point="validation_batch", step=12),
            Fault(kind="kill", slot=2, point="healed", incarnation=1),
        ]
    )
    job = run(plan, tmp_path, validate=True, saves=True, waits=True)
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=2)
    assert_only_the_newest_is_kept(tmp_path, "stock", "async")
    summary = audit(job.events)
    assert summary.problems() == []
    rewound = [event for event in job.events if event["event"] == "rewound"]
    assert all(0 <= event["lost"] <= 4 + 1 for event in rewound)
    assert json.loads((tmp_path / "result_1.json").read_text())["pid"] == int((tmp_path / "pid_1_0").read_text())
    assert "go on from the snapshot of step 4; 2 steps are trained again" in job.stderr
    assert not [name for name in os.listdir("/dev/shm") if "lightning_ft" in name]


def test_two_deaths_at_once_and_one_in_the_recovery_leave_the_newest_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="backward_early", step=9),
            Fault(kind="kill", slot=2, point="generation", step=9),
        ]
    )
    job = run(plan, tmp_path, strategy={"max_restarts": 0})
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=2)
    assert audit(job.events).problems() == []
    assert json.loads((tmp_path / "result_0.json").read_text())["size"] == 1


def test_all_ranks_begin_again_if_none_is_left_and_if_one_dies_before_the_first_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: dict[str, Any] = {"kind": "kill", "point": "gradients_ready", "step": 22, "incarnation": 1, "rendezvous": True}
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="train_start"),
            *(Fault(**at_once, slot=slot) for slot in range(3)),
        ]
    )
    job = run(plan, tmp_path, shard_size=3, validate=True)
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=2)
    assert audit(job.events).problems() == []
    begun = [event["step"] for event in job.events if event["event"] == "begun_anew"]
    assert begun[0] == 0
    assert len(begun) == 2
    rewound = {(event["step"], event["lost"]) for event in job.events if event["event"] == "rewound"}
    assert (20, max(0, begun[1] - 20)) in rewound
    assert "All ranks were started again and go on from the snapshot of step 20" in job.stderr
    assert [path.name for path in tmp_path.glob("**/ft_events/*")] == [path.name for path in tmp_path.glob("ft_events/*")]


def test_without_a_snapshot_the_newest_checkpoint_of_the_run_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=0, point="backward_early", step=20)])
    job = run(plan, tmp_path, without_memory=True, strategy={"max_restarts": 0})
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=2)
    assert audit(job.events).problems() == []
    (resumed,) = {(event["step"], event["path"]) for event in job.events if event["event"] == "resumed"}
    assert resumed == (16, str(tmp_path / "checkpoints" / "epoch=0-step=16.ckpt"))
    assert json.loads((tmp_path / "result_1.json").read_text())["size"] == 2


def test_where_shards_cannot_be_moved_in_place_and_in_a_later_test_all_ranks_begin_again_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=2, point="gradients_ready", step=6),
            Fault(kind="kill", slot=0, point="test_batch", incarnation=1),
        ]
    )
    job = run(plan, tmp_path, unknown_torch=True, max_epochs=1, test=True)
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=1)
    assert_tested(tmp_path)
    assert audit(job.events).problems() == []
    assert "shards can't be moved in place" in job.stderr
    assert "go on from the snapshot of step 4" in job.stderr
    assert json.loads((tmp_path / "result_2.json").read_text())["size"] == 3


def test_if_all_ranks_of_a_replicated_module_die_they_go_on_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=slot, point="gradients_ready", step=20) for slot in range(3)])
    job = run(plan, tmp_path, shard_size=1)
    assert_equals_one_process(tmp_path, monkeypatch, num_epochs=2)
    assert audit(job.events).problems() == []
    assert {event["step"] for event in job.events if event["event"] == "resumed"} == {16}
    assert "epoch=0-step=16.ckpt, of step 16; " in job.stderr
