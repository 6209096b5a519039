"""What SIGTERM, SIGINT and SLURM's requeue signal do to a job."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.testing import FaultPlan, JobResult, assert_steps_contiguous, run_job

SCRIPT = Path(__file__).parent / "jobs" / "signalled.py"
LAST = "checkpoints/last-preempted.ckpt"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., JobResult]:
    """Run ``jobs/signalled.py``; what an earlier run of the test left in its directory stays there, but for exceptions."""

    def run(
        faults: FaultPlan | None = None, env: dict[str, str] | None = None, directory: str = ".", **options: Any
    ) -> JobResult:
        place = tmp_path / directory
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
            timeout=90,
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
        {"to": "rank", "point": "on_before_backward"},
        {"to": "all", "point": "on_save_checkpoint", "checkpoint": {"dirpath": "checkpoints", "every_n_train_steps": 2}},
        {"to": "rank", "accumulate": 3, "checkpoint": {"dirpath": "checkpoints", "save_on_exception": True}},
    ],
    ids=["twice", "backward", "save", "accumulation"],
)
def test_sigterm_ends_all_ranks_after_the_same_step_with_a_checkpoint(options: Any, run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGTERM", **options)
    step = assert_stopped(job)
    assert 5 < step < 8
    (metrics,) = job.directory.glob("lightning_logs/version_0/metrics.csv")
    assert int(list(csv.DictReader(metrics.read_text().splitlines()))[-1]["step"]) == step - 1
    names = {path.name for path in job.directory.glob("checkpoints/*")}
    assert names - {"last-preempted.ckpt"} == ({"epoch=0-step=6.ckpt"} if options["to"] == "all" else set())
    handled = [path.read_text() for path in job.directory.glob("handled_*")]
    assert handled == ["15\n"] * (3 if "handler" in options else 0)


def test_sigint_ends_the_job_and_nobody_is_started_again(run: Callable[..., JobResult]) -> None:
    job = run(signal="SIGINT")
    assert job.returncode == 1
    assert {name for name, _ in steps_at_the_end(job)} == {"KeyboardInterrupt"}
    assert len([event for event in job.events if event["event"] == "spawn"]) == 3
