import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.testing import read_newest_run, run_job, run_ranks, run_without_supervisor
from lightning_ft.testing.processes import children


def write_script(directory: Path, text: str) -> Path:
    path = directory / "script.py"
    path.write_text(text)
    return path


def test_a_job_runs_in_its_directory_with_its_arguments_and_environment(tmp_path: Path) -> None:
    text = "import os, sys\nprint(os.getcwd(), sys.argv[1:], os.environ['GREETING'], os.environ['LIGHTNING_FT_SLOT'])"
    job = run_job(write_script(tmp_path, text), ["a", "b"], num_slots=2, env={"GREETING": "hi"}, directory=tmp_path)
    job.check()
    for slot in range(2):
        assert f"{tmp_path} ['a', 'b'] hi {slot}" in job.stdout
    assert job.events == []


def test_a_job_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    job = run_job(write_script(tmp_path, "raise SystemExit('no luck')"), num_slots=1, directory=tmp_path)
    assert job.returncode == 1
    with pytest.raises(AssertionError, match=r"(?s)ended with code 1.*no luck"):
        job.check()


def test_a_job_that_takes_too_long_leaves_no_process_and_says_where_it_was(tmp_path: Path) -> None:
    run_job(write_script(tmp_path, ""), num_slots=1, directory=tmp_path)  # the fork server is there from now on
    before = set(children(os.getpid()))
    text = "import signal\ndef wait_for_nothing():\n    signal.pause()\nprint('waiting', flush=True)\nwait_for_nothing()"
    with pytest.raises(TimeoutError, match=r"(?s)did not end within 6 s.*in wait_for_nothing"):
        run_job(write_script(tmp_path, text), num_slots=2, directory=tmp_path, timeout=6)
    assert set(children(os.getpid())) == before


def test_ranks_without_a_supervisor_know_each_other_as_under_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LIGHTNING_FT_SLOT")
    text = f"import os\nprint(*(os.environ.get(name) for name in {names}))"
    job = run_without_supervisor(write_script(tmp_path, text), num_ranks=2, directory=tmp_path).check()
    assert sorted(job.stdout.splitlines()) == ["0 0 2 None", "1 1 2 None"]


def describe(engine: Any, word: str) -> dict[str, Any]:
    return {"slot": engine.slot, "members": list(engine.members), "word": word}


def test_ranks_return_what_the_function_returned(tmp_path: Path) -> None:
    results = run_ranks(describe, 2, args=["hello"], directory=tmp_path)
    assert results == [{"slot": slot, "members": [0, 1], "word": "hello"} for slot in range(2)]


def fail(engine: Any) -> None:
    raise ValueError("on purpose")


def test_ranks_that_fail_are_an_error_with_their_output() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with code 1.*ValueError: on purpose"):
        run_ranks(fail, 2)


def test_a_directory_without_a_run_has_no_events(tmp_path: Path) -> None:
    assert read_newest_run(tmp_path) == []
