"""Silent corruption of one rank of several, found in its step and on its rank: real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.testing import (
    assert_every_ticket_once,
    assert_no_violations,
    assert_steps_contiguous,
    run_job,
    run_without_supervisor,
)

JOB = Path(__file__).parent / "jobs" / "replayed.py"


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result_*.json"))]


@pytest.mark.parametrize(("strategy", "devices"), [("FTStrategy", 3), ("sharded", 4), ("ddp", 2), ("fsdp2", 2)])
def test_corruption_of_a_rank_is_found_in_its_step_and_on_that_rank(strategy: str, devices: int, tmp_path: Path) -> None:
    arguments = [strategy, str(devices), "known", "clean", "gradient", "parameter"]
    if strategy in ("ddp", "fsdp2"):
        run_without_supervisor(JOB, arguments, num_ranks=devices, directory=tmp_path).check()
    else:
        job = run_job(JOB, arguments, num_slots=devices, directory=tmp_path).check()
        began = [event["began"] for event in job.events if event["event"] == "replay"]
        assert [step for step in began if step is not None] == [4, 5]
    for result in results(tmp_path):
        known, clean = result["known"], result["clean"]
        assert clean["weights"] == known["weights"]
        assert clean["metrics"] == known["metrics"]
        assert known["steps"] == 7
        assert [row["step"] for row in clean["replays"]] == [4, 7, *([8] if strategy != "sharded" else [])]
        assert all(row["began"] is None for row in clean["replays"])
        found = {
            scenario: [(row["began"], row["what"], row["ranks"]) for row in result[scenario]["replays"] if row["ranks"]]
            for scenario in ("gradient", "parameter")
        }
        assert found["parameter"] == [(5, "parameters", [1])]
        if strategy in ("FTStrategy", "ddp"):
            assert found["gradient"] == [(4, "own gradient norm", [1])]
        else:  # the ranks of a replica share their gradient
            assert found["gradient"] == [(4, "gradient norm", list(range(devices)))]
        assert not any(scenario["rejections"] for scenario in result.values())


def test_a_rank_may_die_while_steps_are_run_again(tmp_path: Path) -> None:
    job = run_job(JOB, ["FTStrategy", "3", "killed"], num_slots=3, directory=tmp_path).check()
    assert_every_ticket_once(job.events)
    assert_steps_contiguous(job.events)
    assert_no_violations(job.events)
    assert "Nothing is said of steps 4 to 7, which can't be run again: somebody died meanwhile" in job.stderr
    told = [(row["step"], row["began"]) for result in results(tmp_path) for row in result["killed"]["replays"]]
    assert set(told) == {(4, None)}  # and nothing wrong about step 7, either, which is averaged with its gradient
    weights = [result["killed"]["weights"] for result in results(tmp_path)]
    parameters = [{name: value for name, value in one.items() if "running" not in name} for one in weights]
    assert all(one == parameters[0] for one in parameters)
