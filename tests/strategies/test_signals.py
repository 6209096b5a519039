"""What SIGTERM, SIGINT and SLURM's requeue signal do to a job."""

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.testing import Fault, FaultPlan, JobResult, assert_steps_contiguous, assert_used_up, run_job

SCRIPT = Path(__file__).parent / "jobs" / "signalled.py"
LAST = "checkpoints/last-preempted.ckpt"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., JobResult]:
    """Run ``jobs/signalled.py``; what an earlier run of the test left in its directory stays there, but for exceptions."""

    def run(
        faults: FaultPlan | None = None, env: dict[str, str] | None = None, directory: str = ".", **options: Any
    ) -> JobResult:
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        for path in place.glob("exception_*"):
            path.unlink()
        options = {"checkpoint": {"dirpath": "checkpoints"}, **options}
        return run_job(
            SCRIPT,
            [json.dumps(options)],
            num_slots=options.get("devices", 3),
            faults=faults,
            env=env,
            directory=place,
        )

    return run


def steps_at_the_end(job: JobResult) -> list[tuple[str, int]]:
    """Which exception the callbacks of each rank saw, and after which step."""
    texts = [path.read_text().split() for path in sorted(job.directory.glob("exception_*"))]
    return [(name, int(step)) for name, step in texts]


def assert_stopped(job: JobResult, num_ranks: int = 3, name: str = LAST) -> int:
    """All ranks ended after the same step, which is what the checkpoint holds; return it."""
    assert job.returncode == 143, job.tail()
    assert not re.search("Traceback|died", job.stderr), job.tail()
    assert_steps_contiguous(job.events)
    ((kind, step),) = set(steps_at_the_end(job))
    assert (kind, len(steps_at_the_end(job))) == ("SIGTERMException", num_ranks)
    assert step == max(event["step"] for event in job.events if event["event"] == "step")
    assert torch.load(job.directory / name, weights_only=True)["global_step"] == step
    return step


@pytest.mark.parametrize(
    "options",
    [
        {"to": "supervisor", "times": 2, "handler": True},
        {"to": "rank", "point": "on_before_backward", "manual": True},
        {"to": "all", "num_workers": 1},
        {"point": "on_save_checkpoint", "checkpoint": {"dirpath": "checkpoints", "every_n_train_steps": 2}},
        {"to": "rank", "accumulate": 3, "checkpoint": {"dirpath": "checkpoints", "save_on_exception": True}},
    ],
    ids=["twice", "manual", "all", "save", "accumulation"],
)
def test_sigterm_ends_all_ranks_after_the_same_step_with_a_checkpoint(options: Any, run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGTERM", **options)
    step = assert_stopped(job)
    assert 5 < step < 8
    (metrics,) = job.directory.glob("lightning_logs/version_0/metrics.csv")
    assert int(list(csv.DictReader(metrics.read_text().splitlines()))[-1]["step"]) == step - 1
    names = {path.name for path in job.directory.glob("checkpoints/*")}
    assert names - {"last-preempted.ckpt"} == (
        {"epoch=0-step=6.ckpt"} if "every_n_train_steps" in options.get("checkpoint", {}) else set()
    )
    handled = [path.read_text() for path in job.directory.glob("handled_*")]
    assert handled == ["15\n"] * (3 if "handler" in options else 0)


def test_sigterm_breaks_a_long_validation_off_and_the_next_run_begins_with_it(run: Callable[..., JobResult]) -> None:
    options = {"num_samples": 48, "max_epochs": 2, "validation": True, "num_validation_samples": 2000}
    job = run(signal="SIGTERM", to="rank", point="on_validation_batch_start", step=4, **options)
    assert assert_stopped(job) == 4
    assert not list(job.directory.glob("validated_*"))
    job = run(**options).check()
    assert steps_of(job) == [5, 6, 7, 8]
    assert [path.read_text().split() for path in job.directory.glob("validated_*")] == [["4", "8"]] * 3


@pytest.mark.parametrize(("call", "last"), [("test", False), ("predict", False), ("predict", True)])
def test_sigterm_to_one_rank_ends_an_evaluation_in_all(call: str, last: bool, run: Callable[..., JobResult]) -> None:
    point, calls = f"on_{call}_batch_start", [call, "validate"]
    num_samples = 24 if last else 2000  # the others may be through with theirs
    options = {"calls": calls, "num_validation_samples": num_samples, "devices": 2, "last": last}
    job = run(signal="SIGTERM", to="rank", point=point, step=0, **options)
    assert job.returncode == 143, job.tail()
    assert steps_at_the_end(job) == [("SIGTERMException", 0)] * 2
    assert not list(job.directory.glob("completed_*"))


def test_sigterm_after_the_last_step_ends_the_job_before_the_next_call(run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGTERM", to="rank", point="on_train_end", max_steps=6, calls=["fit", "validate"])
    assert assert_stopped(job) == 6
    assert not list(job.directory.glob("result_*"))


def test_sigterm_before_the_loops_run_ends_the_job(run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGTERM", to="rank", point="on_fit_start", step=0)
    assert job.returncode == 143, job.tail()
    assert len([event for event in job.events if event["event"] == "spawn"]) == 3


@pytest.mark.parametrize("to", ["supervisor", "rank"])
def test_sigterm_while_ranks_are_awaited_ends_the_job_with_a_checkpoint(to: str, run: Callable[..., JobResult]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="forward", step=4)])
    job = run(plan, second_life="SIGTERM", to=to, min_replicas=3, max_steps=60)
    assert job.returncode == 143, job.tail()
    assert_used_up(plan, job.events)
    assert steps_at_the_end(job) == [("SIGTERMException", 5)] * 2
    assert torch.load(job.directory / LAST, weights_only=True)["global_step"] == 5


def test_rank_0_dies_while_it_saves_the_last_checkpoint(run: Callable[..., JobResult]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=0, point="during_save")])
    job = run(plan, signal="SIGTERM")
    assert job.returncode == 143, job.tail()
    assert_used_up(plan, job.events)
    ((_, step),) = set(steps_at_the_end(job))
    assert torch.load(job.directory / LAST, weights_only=True)["global_step"] == step
    assert [path.name for path in job.directory.glob("checkpoints/*")] == ["last-preempted.ckpt"]


def test_what_is_open_when_a_job_stops_at_the_planned_end_of_an_epoch_is_trained_by_the_next(
    run: Callable[..., JobResult],
) -> None:
    options = {"num_samples": 96, "max_epochs": 1, "max_restarts": 0, "validation": True, "val_check_interval": 0.5}
    plan = FaultPlan([Fault(kind="kill", slot=2, point="forward", step=4)])
    job = run(plan, signal="SIGTERM", to="rank", step=7, **options)
    assert job.returncode == 143, job.tail()
    assert {step for _, step in steps_at_the_end(job)} == {8}, "all that were planned"
    trained = tickets_of(job)
    job = run(**options).check()
    assert steps_of(job)[0] == 9
    assert sorted(trained + tickets_of(job)) == list(range(24))


def tickets_of(job: JobResult) -> list[int]:
    steps = [event for event in job.events if event["event"] == "step" and event["slot"] == 0]
    return [ticket for step in steps for tickets in step["tickets"].values() for ticket in tickets]


def test_sigint_ends_the_job_and_nobody_is_started_again(run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGINT")
    assert job.returncode == 1
    assert {name for name, _ in steps_at_the_end(job)} == {"KeyboardInterrupt"}
    assert len([event for event in job.events if event["event"] == "spawn"]) == 3


@pytest.mark.parametrize(
    "options",
    [{"max_epochs": 4, "validation": True}, {"max_steps": 15}],
    ids=["epochs", "steps"],
)
def test_five_preemptions_lose_nothing_and_leave_one_checkpoint(options: Any, run: Callable[..., JobResult]) -> None:
    options |= {"devices": 2, "num_samples": 32, "version": 0}
    steps: list[int] = []
    for stop in (2, 4, 8, 9, 12):
        job = run(signal="SIGTERM", to="rank", step=stop - 1, **options)
        assert assert_stopped(job, num_ranks=2) == stop
        steps += steps_of(job)
        assert len(list(job.directory.glob("checkpoints/last*"))) == 1
    job = run(**options).check()
    assert steps + steps_of(job) == list(range(1, 16 + ("max_epochs" in options)))
    assert [path.name for path in job.directory.glob("lightning_logs/*")] == ["version_0"]
    whole = run(directory="whole", **options).check()
    for name in ("result_*.json", "validated_*"):
        texts = [path.read_text() for done in (job, whole) for path in done.directory.glob(name)]
        assert len(texts) == (0 if "max_steps" in options and "validated" in name else 4)
        assert all(text == texts[0] for text in texts), texts
    assert [path.name for path in job.directory.glob("checkpoints/*") if "last" in path.name] == []


def steps_of(job: JobResult) -> list[int]:
    return [event["step"] for event in job.events if event["event"] == "step" and event["slot"] == 0]


def test_requeue_signal_saves_a_checkpoint_and_requeues_the_slurm_job_once(
    tmp_path: Path, run: Callable[..., JobResult]
) -> None:
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$@" >> scontrol_calls\n')
    stub.chmod(0o755)
    slurm = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    job = run(signal="SIGUSR1", env=slurm, ckpt_path=None, max_steps=12)
    step = assert_stopped(job, name="hpc_ckpt_1.ckpt")
    assert (tmp_path / "scontrol_calls").read_text() == "requeue 77\n"
    job = run(signal="SIGTERM", step=8, env=slurm, ckpt_path=None, max_steps=12)
    assert steps_of(job)[0] == step + 1
    assert assert_stopped(job, name="hpc_ckpt_1.ckpt") > step
