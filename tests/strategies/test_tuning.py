"""Deaths while a learning rate is searched."""

import json
from pathlib import Path

from lightning_ft.testing import run_job


def test_ranks_that_die_in_a_search_come_back_and_take_over_what_was_found(tmp_path: Path) -> None:
    job = run_job(Path(__file__).parent / "jobs" / "tuning.py", [], num_slots=3, directory=tmp_path)
    assert job.returncode == 0, job.tail()
    assert {path.name for path in tmp_path.iterdir()} >= {"tuner", "callback"}
    assert "CollectiveMismatchError" not in job.stderr
    results = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(3)]
    assert results[1:] == results[:1] * 2
    tuner, after_tuner, trained_with, in_optimizer, callback = results[0][0]
    assert tuner == after_tuner
    assert trained_with == in_optimizer == callback
