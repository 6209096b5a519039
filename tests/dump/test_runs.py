"""What is removed when a run begins, and what is not."""

import logging
import threading
import time
from pathlib import Path

import pytest

from lightning_ft.dump.layout import Attempt, begin_attempt
from lightning_ft.dump.reader import find_attempts
from lightning_ft.dump.runs import Run
from lightning_ft.errors import DumpError


def begin(directory: Path, run_id: str, phase: str = "train", rollout: int = 0) -> Path:
    path = begin_attempt(directory, Attempt("model", phase, rollout, run_id, 1, time.time()))
    (path / "something").write_text("values")
    return path


def wait_for_removal() -> None:
    for thread in threading.enumerate():
        if thread.name == "removal of dumps":
            thread.join(60)


def test_a_run_removes_what_runs_that_ended_left_in_that_phase_and_only_once(tmp_path: Path) -> None:
    paths = [begin(tmp_path, "old", rollout=rollout) for rollout in (0, 0, 1)]
    kept = begin(tmp_path, "old", "validate")
    run = Run(tmp_path / "model", "new")
    own = begin(tmp_path, "new")
    assert run.remove_earlier("train")
    assert not any(path.exists() for path in paths), "readers don't see them any more"
    late = begin(tmp_path, "old")
    again = Run(tmp_path / "model", "new")
    assert not again.remove_earlier("train"), "a process of the same run that comes back cleans up nothing"
    wait_for_removal()
    left = {path for path in tmp_path.rglob("something")}
    assert left == {path / "something" for path in (kept, own, late)}
    assert [found.path for found in find_attempts(tmp_path)] == [own, late, kept]


def test_nothing_of_a_run_that_lives_is_removed(tmp_path: Path) -> None:
    other_cell, joiner = Run(tmp_path / "model", "living"), Run(tmp_path / "model", "living")
    path = begin(tmp_path, "living")
    other_cell.close()
    run = Run(tmp_path / "model", "second")
    assert run.remove_earlier("train")
    assert path.exists(), "one of its processes is there"
    joiner.close()
    assert Run(tmp_path / "model", "third").remove_earlier("train")
    wait_for_removal()
    with pytest.raises(DumpError, match="there is no attempt"):
        find_attempts(tmp_path)


def test_what_can_not_be_removed_is_told_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begin(tmp_path, "old")
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError("stale file handle")))
        assert Run(tmp_path / "model", "new").remove_earlier("train")
    assert f"The dump {path} of an earlier run is not removed: stale file handle." in caplog.text
    assert path.exists()
    (tmp_path / "critic" / "train").parent.mkdir()
    (tmp_path / "critic" / "train").write_text("in the way")
    assert not Run(tmp_path / "critic", "new").remove_earlier("train")
    assert f"Dumps of earlier runs in {tmp_path / 'critic' / 'train'} are not removed: [Errno 17]" in caplog.text
