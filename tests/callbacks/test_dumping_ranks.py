"""TensorDump where there are several ranks: who writes, and that the same comes out however the model lies on them."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.dump.diff import assert_dumps_equal, compare
from lightning_ft.dump.reader import find_attempts
from lightning_ft.events.log import read_events
from lightning_ft.testing import Fault, FaultPlan, JobResult, assert_used_up, run_job, run_without_supervisor

JOB = Path(__file__).parent / "jobs" / "dumping.py"
NUM_KILLS = int(os.environ.get("DUMP_TEST_KILLS", "4"))
Run = Callable[..., JobResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``jobs/dumping.py`` in a directory of its own."""

    def run(name: str, **options: Any) -> JobResult:
        directory = tmp_path / name
        directory.mkdir()
        arguments, where = [json.dumps(options)], {"directory": directory, "timeout": 300.0}
        if "shard_size" in options:
            job = run_job(JOB, arguments, num_slots=options["devices"], **where)
        else:
            job = run_without_supervisor(JOB, arguments, num_ranks=options["devices"], **where)
        return job.check()

    return run


def parts(job: JobResult) -> list[int]:
    attempts = find_attempts(job.directory / "dumps")
    assert [(found.attempt.phase, found.attempt.rollout) for found in attempts] == [
        ("train", 0),
        ("train", 1),
        ("validate", 0),
        ("validate", 1),
    ]
    for found in attempts:
        assert found.is_complete
        found.verify()
    return [found.attempt.num_parts for found in attempts]


def test_rank_0_of_ddp_and_of_ft_strategy_write_the_same_and_others_have_no_hooks(run: Run) -> None:
    jobs = [run("ddp", devices=2, strategy="ddp", accumulate=2), run("ft", devices=2, shard_size=1, accumulate=2)]
    for job in jobs:
        assert parts(job) == [1, 1, 1, 1]
        assert "rank 0 has 4 hooks" in job.stdout
        assert "rank 1 has 0 hooks" in job.stdout
    assert_dumps_equal(*(job.directory / "dumps" for job in jobs))


def test_a_model_sharded_over_two_ranks_is_dumped_whole_and_equals_that_of_one(run: Run) -> None:
    one, two = run("one", devices=1), run("two", devices=2, shard_size=2)
    assert parts(two) == [2, 2, 2, 2]
    assert "rank 1 has 4 hooks" in two.stdout
    dumps = [job.directory / "dumps" for job in (one, two)]
    assert_dumps_equal(*dumps, rtol=1e-4, atol=1e-6)
    compared = {row.key.name.partition(":")[0] for row in compare(*dumps, rtol=1e-4, atol=1e-6).rows}
    state = {"parameter", "parameter_grad", "optimizer"}
    assert compared == state | {"batch", "loss", "input", "output", "grad_input", "grad_output"}


def writer_pid(directory: Path) -> int | None:
    """Return the process that is rank 0 of a running job, if there are others that could go on without it."""
    paths = list(directory.glob("**/ft_events/*/supervisor.jsonl"))
    if not paths:
        return None
    pids: dict[tuple[int, int], int] = {}
    generation: dict[str, Any] = {"members": []}
    joined = {(0, 0), (1, 0)}
    for event in read_events(paths[0].parent):
        if event["event"] == "spawn":
            pids[event["slot"], event["incarnation"]] = event["pid"]
        elif event["event"] == "joined":
            joined.add((event["slot"], event["incarnation"]))
        elif event["event"] == "generation" and event["slot"] is None:
            generation = event
    members = [(slot, generation["incarnations"][str(slot)]) for slot in generation["members"]]
    return pids[members[0]] if len(members) == 2 and set(members) <= joined else None


def kill_writers(directory: Path, count: int, seed: int, snapshots: list[dict[Path, int]]) -> None:
    """Kill whoever writes, again and again, at moments that nothing in the job knows of; then ask it to stop."""
    moments = random.Random(seed)
    killed: set[int] = set()
    deadline = time.monotonic() + 20.0 * count
    while len(killed) < count and time.monotonic() < deadline:
        pid = writer_pid(directory)
        if pid is None or pid in killed:
            time.sleep(0.02)
            continue
        time.sleep(moments.uniform(0.0, 0.4))
        snapshots.append({path: path.stat().st_size for path in (directory / "dumps").rglob("*") if is_lasting(path)})
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    (directory / "stop").touch()
    assert len(killed) == count


def is_lasting(path: Path) -> bool:
    """Whether nothing gives the file another name or takes it away while the job runs."""
    return path.is_file() and not any(part.startswith(".") for part in path.parts[-2:])


def test_writers_killed_at_random_moments_cost_their_attempt_and_nothing_of_others(tmp_path: Path) -> None:
    """Two cells write rollout 0 in turn: whoever is killed comes back in it and is the next to write, and to be killed."""
    snapshots: list[dict[Path, int]] = []
    options = {"devices": 2, "shard_size": 1, "only_rollout_0": True, "num_samples": 400000, "val_check_interval": 20}
    with ThreadPoolExecutor(1) as executor:
        killing = executor.submit(kill_writers, tmp_path, NUM_KILLS, 7, snapshots)
        job = run_job(JOB, [json.dumps(options)], num_slots=2, directory=tmp_path, timeout=500.0)
        killing.result()
    job.check()
    for snapshot in snapshots:
        for path, size in snapshot.items():
            assert path.stat().st_size >= size, f"{path} was lost"
    attempts = find_attempts(tmp_path / "dumps")
    whole = [found for found in attempts if found.is_complete]
    for found in whole:
        found.verify()
    for phase in ("train", "validate"):
        numbers = [found.number for found in attempts if found.attempt.phase == phase]
        assert numbers == list(range(1, len(numbers) + 1))
    training = [found for found in attempts if found.attempt.phase == "train"]
    assert len(training) >= NUM_KILLS // 2
    assert [found.is_complete for found in training] == [False] * (len(training) - 1) + [True]


def test_death_of_a_shard_while_weights_are_gathered_costs_that_attempt_and_the_other_replica_writes_on(
    tmp_path: Path,
) -> None:
    """Slot 1 is killed in the first step of rollout 1, when slot 0 waits for its part of a gradient."""
    plan = FaultPlan([Fault(kind="kill", slot=1, point="before_optimizer_step", step=5)])
    options = {"devices": 4, "shard_size": 2, "rollout_id": 5, "num_samples": 16 * 15, "max_epochs": 1}
    job = run_job(JOB, [json.dumps(options)], num_slots=4, faults=plan, directory=tmp_path, timeout=400.0)
    job.check()
    assert_used_up(plan, job.events)
    attempts = [found for found in find_attempts(tmp_path / "dumps") if found.attempt.phase == "train"]
    assert attempts[0].is_complete
    first, second = (found for found in attempts if found.attempt.rollout == 1)
    assert not first.is_complete
    assert second.is_complete
    for found in attempts:
        if found.is_complete:
            found.verify()
            names = {entry.name for entry in found.entries()}
            assert {"parameter:net.3.weight", "parameter_grad:net.3.weight"} <= names
