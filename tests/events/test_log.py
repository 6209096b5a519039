import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.events.log import EventLog, read_events


def ticking() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


def test_events_from_before_and_after_open_are_in_the_file_of_their_slot_and_incarnation(tmp_path: Path) -> None:
    events = EventLog(slot=2, incarnation=1, clock=ticking())
    events.emit("start")
    events.open(tmp_path / "events")
    events.emit("commit", step=3, loss=0.25, tickets=[1, None])
    events.close()
    assert [path.name for path in (tmp_path / "events").iterdir()] == ["slot_2.incarnation_1.jsonl"]
    assert read_events(tmp_path / "events") == [
        {"t": 0.0, "event": "start", "slot": 2, "incarnation": 1},
        {"t": 1.0, "event": "commit", "slot": 2, "incarnation": 1, "step": 3, "loss": 0.25, "tickets": [1, None]},
    ]


def test_the_supervisor_has_its_own_file_and_may_speak_about_a_slot(tmp_path: Path) -> None:
    events = EventLog(slot=None)
    events.open(tmp_path)
    events.emit("death", slot=3, signal=9)
    assert (tmp_path / "supervisor.jsonl").exists()
    assert read_events(tmp_path)[0]["slot"] == 3


def test_files_are_merged_by_time_and_ties_keep_the_order_of_their_file(tmp_path: Path) -> None:
    times = {0: iter([1.0, 3.0, 3.0]), 1: iter([0.0, 2.0, 4.0])}
    for slot, clock in times.items():
        events = EventLog(slot, 0, clock.__next__)
        events.open(tmp_path)
        for name in "abc":
            events.emit(name)
    assert [(record["slot"], record["event"]) for record in read_events(tmp_path)] == [
        (1, "a"),
        (0, "a"),
        (1, "b"),
        (0, "b"),
        (0, "c"),
        (1, "c"),
    ]


def test_memory_keeps_the_newest_ten_thousand_lines_and_says_how_many_went(tmp_path: Path) -> None:
    events = EventLog(0, 0, ticking())
    for number in range(10_003):
        events.emit("step", number=number)
    events.open(tmp_path)
    read = read_events(tmp_path)
    assert [record["number"] for record in read[:-1]] == list(range(3, 10_003))
    assert (read[-1]["event"], read[-1]["count"]) == ("events_dropped", 3)


def test_close_may_be_called_twice_and_later_events_wait_for_the_next_open(tmp_path: Path) -> None:
    events = EventLog(0, 0, ticking())
    events.open(tmp_path)
    events.close()
    events.close()
    events.emit("later")
    assert read_events(tmp_path) == []
    events.open(tmp_path)
    events.open(tmp_path)
    assert [record["event"] for record in read_events(tmp_path)] == ["later"]


def test_listeners_hear_of_an_event_before_it_is_written_and_may_emit_and_raise(tmp_path: Path) -> None:
    events = EventLog(0, 0, ticking())
    events.open(tmp_path)
    heard: list[tuple[str, Any, int]] = []

    def listen(event: str, record: dict[str, Any]) -> None:
        heard.append((event, record["slot"], len(read_events(tmp_path))))
        if event == "outer":
            events.emit("inner")
        if event == "refused":
            raise KeyError("stop here")

    events.subscribe(listen)
    events.emit("outer")
    with pytest.raises(KeyError, match="stop here"):
        events.emit("refused")
    assert heard == [("outer", 0, 0), ("inner", 0, 0), ("refused", 0, 2)]
    assert [record["event"] for record in read_events(tmp_path)] == ["outer", "inner"]


def test_a_line_torn_by_a_crash_is_left_out_and_counted_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "slot_0.incarnation_0.jsonl"
    path.write_bytes(b'{"t":0.0,"event":"a"}\n{"t":1.0,"eve')
    assert [record["event"] for record in read_events(tmp_path)] == ["a"]
    assert read_events(tmp_path).num_torn == 1
    events = EventLog(0, 0)
    events.open(tmp_path)
    events.emit("b")
    read = read_events(tmp_path)
    assert [record["event"] for record in read] == ["a", "b"]
    assert read.num_torn == 1


def test_values_that_are_not_json_are_written_as_text(tmp_path: Path) -> None:
    events = EventLog(0, 0)
    events.open(tmp_path)
    events.emit("save", path=Path("a/b"), text="line\nbreak \u2028 \r")
    assert read_events(tmp_path)[0]["path"] == "a/b"
    assert read_events(tmp_path)[0]["text"] == "line\nbreak \u2028 \r"


def test_a_full_disk_is_reported_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [1000, 10, 0, -1, 0, 1, 1000]
    real_write = os.write

    def write(fd: int, line: bytes) -> int:
        allowed = room.pop(0)
        if allowed < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, line[:allowed]) if allowed else 0

    events = EventLog(0, 0, ticking())
    events.open(tmp_path)
    monkeypatch.setattr(os, "write", write)
    with caplog.at_level(logging.WARNING):
        for name in "abcdefg":
            events.emit(name)
    assert len(caplog.records) == 1
    assert "Training goes on." in caplog.text
    assert events.num_lost == 5
    read = read_events(tmp_path)
    assert [record["event"] for record in read] == ["a", "g"]
    assert read.num_torn == 1


def test_a_directory_that_cannot_be_made_is_reported_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    events = EventLog(0, 0)
    events.open(tmp_path / "file")
    events.emit("kept")
    assert "Events are being lost" in caplog.text
    events.open(tmp_path)
    assert [record["event"] for record in read_events(tmp_path)] == ["kept"]


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    events = EventLog(0, 0)
    events.open(tmp_path)

    def emit_many(name: str) -> None:
        for number in range(300):
            events.emit(name, number=number)

    threads = [threading.Thread(target=emit_many, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    read = read_events(tmp_path)
    assert read.num_torn == 0
    for name in "abcd":
        assert [record["number"] for record in read if record["event"] == name] == list(range(300))


def test_every_event_is_there_after_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from lightning_ft.events.log import EventLog\n"
        "events = EventLog(0, 0)\n"
        "events.open(sys.argv[1])\n"
        "for number in range(500): events.emit('step', number=number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=120, check=False)
    assert result.returncode == -signal.SIGKILL
    read = read_events(tmp_path)
    assert [record["number"] for record in read] == list(range(500))
    assert read.num_torn == 0


def test_an_event_is_logged_as_words_and_its_text_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog(0, 0, ticking())
    events.open(tmp_path)
    with caplog.at_level(logging.DEBUG):
        events.emit("step", step=3)
        events.emit("hung", how="SIGSTOP", stacks="x" * 100_000)
    assert caplog.messages[0] == "t=0.0 event=step slot=0 incarnation=0 step=3"
    step, hung = read_events(tmp_path)
    assert (step["step"], hung["how"]) == (3, "SIGSTOP")
    assert len(hung["stacks"]) < 5000
