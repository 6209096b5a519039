"""A job is asked for things while it runs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import cli
from lightning_ft.events.history import find_run
from lightning_ft.supervision.control import ask
from lightning_ft.testing import assert_no_violations, run_job

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workload.py"


def until(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    """Return once it holds; look again every now and then."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "It did not come to hold."
        pause.wait(0.05)


def states(run: Path) -> list[str]:
    return [row["state"] for row in ask(run, "status")["status"]["slots"]]


def is_there(root: Path) -> bool:
    return any(root.rglob("control.json"))


def test_a_user_suspends_resumes_excludes_and_drills_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[Any] = ["--size", "0.01M", "--devices", 3, "--steps", 1000000, "--epoch-steps", 50, "--work", 0.02]
    arguments += ["--stop-file", tmp_path / "stop", "--directory", tmp_path]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_job, WORKLOAD, list(map(str, arguments)), num_slots=3, directory=tmp_path)
        try:
            until(lambda: is_there(tmp_path) or running.done())
            run = find_run(tmp_path)
            until(lambda: states(run) == ["member"] * 3 and ask(run, "status")["status"]["step"] > 0)
            assert ask(run, "suspend", 1)["accepted"]
            until(lambda: states(run) == ["member", "suspended", "member"])
            assert "would be left" not in ask(run, "suspend", 7)["answer"]
            with pytest.raises(SystemExit, match="0"):
                cli.main(["ctl", str(tmp_path), "status"])
            assert "slot 1: suspended" in capsys.readouterr().out
            with pytest.raises(SystemExit, match=r"Refused: slot 1 has no process now\."):
                cli.main(["ctl", str(run), "fault", "kill", "1"])
            with pytest.raises(SystemExit, match="0"):
                cli.main(["ctl", str(run), "resume", "1"])
            until(lambda: states(run) == ["member"] * 3)
            assert ask(run, "fault", 2, "kill")["accepted"]
            until(lambda: _incarnations(run) == [0, 1, 1])
            assert ask(run, "exclude", 0)["accepted"]
            until(lambda: _incarnations(run) == [1, 1, 1])
        finally:
            (tmp_path / "stop").touch()
        job = running.result(timeout=180).check()
    asked = [(event["command"], event["target"], event["accepted"]) for event in job.events if event["event"] == "control"]
    assert asked == [
        ("suspend", 1, True),
        ("suspend", 7, False),
        ("fault", 1, False),
        ("resume", 1, True),
        ("fault", 2, True),
        ("exclude", 0, True),
    ]
    deaths = [event["how"] for event in job.events if event["event"] == "exit" and event["code"] != 0]
    assert deaths == ["excluded: suspended", "SIGKILL", "excluded: asked for"]
    assert_no_violations(job.events)
    with pytest.raises(ConnectionError, match="the job has ended"):
        ask(run, "status")


def _incarnations(run: Path) -> list[int]:
    rows = ask(run, "status")["status"]["slots"]
    return [row["incarnation"] if row["state"] == "member" else -1 for row in rows]
