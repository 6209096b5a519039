"""What SIGTERM and SIGINT do to a job."""

import csv
import re
from pathlib import Path

import pytest

from lightning_ft.testing import assert_steps_contiguous, run_job

SCRIPT = Path(__file__).parent / "jobs" / "signalled.py"


@pytest.mark.parametrize("to", ["supervisor", "rank"])
def test_sigterm_ends_all_ranks_after_the_same_step(to, tmp_path):
    result = run_job(SCRIPT, ["SIGTERM", to], num_slots=3, directory=tmp_path, timeout=60)
    assert result.returncode == 143, result.tail()
    assert_steps_contiguous(result.events)
    texts = {path.read_text() for path in tmp_path.glob("exception_*")}
    assert len(list(tmp_path.glob("exception_*"))) == 3
    assert len(texts) == 1
    assert re.fullmatch(r"SIGTERMException [1-9]\d*", *texts)
    (metrics,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    assert list(csv.DictReader(metrics.read_text().splitlines()))


def test_sigint_ends_the_job_and_nobody_is_started_again(tmp_path):
    result = run_job(SCRIPT, ["SIGINT", "supervisor"], num_slots=3, directory=tmp_path, timeout=60)
    assert result.returncode not in (0, None)
    assert {path.read_text().split()[0] for path in tmp_path.glob("exception_*")} == {"KeyboardInterrupt"}
    assert len([event for event in result.events if event["event"] == "spawn"]) == 3
