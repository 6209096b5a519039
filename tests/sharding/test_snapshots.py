"""Snapshots in shared memory: readable after the death of who wrote them, whole whenever that was."""

import errno
import os
import random
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.sharding.shared_slots import Label, Moment, SharedSlot
from lightning_ft.sharding.snapshots import Snapshots, find_whole
from lightning_ft.supervision.host_memory import HostMemory, paths_of
from lightning_ft.testing.processes import fork_server

JOB = Path(__file__).parent / "jobs" / "snapshotting.py"


@contextmanager
def memories(count: int) -> Iterator[list[str]]:
    memory = HostMemory(count // 2)
    try:
        yield [path for paths in paths_of(memory.name) for path in paths]
    finally:
        memory.close()


def take(snapshots: Snapshots, step: int, *, index: int = 0, count: int = 1, whole: bool = True, **kwargs: Any) -> None:
    state = {"step": step, "weight": torch.full((1000,), float(step))}
    label = Label(Moment(0, step), index, count)
    snapshots.begin(label, state, latest_is_whole=whole, **kwargs)
    snapshots.fence()


def steps(paths: list[str]) -> list[int]:
    return [found.moment.step for found in find_whole(paths)]


def test_whenever_a_rank_is_killed_its_newest_whole_snapshot_is_read_by_others(tmp_path: Path) -> None:
    rng, newest, pipe = random.Random(0), 0, tmp_path / "stdout"
    os.mkfifo(pipe)
    with memories(2) as paths:
        for trial in range(6):
            reader = os.open(pipe, os.O_RDWR)
            command = [str(JOB), str(newest + 1), *paths]
            process = fork_server().start(command, dict(os.environ), tmp_path, pipe, tmp_path / "stderr")
            said, wanted = b"", rng.randrange(1, 40)
            while said.count(b"\n") < wanted:
                assert select.select([reader], [], [], 60.0)[0], (tmp_path / "stderr").read_text()
                said += os.read(reader, 4096)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait(60.0) == -signal.SIGKILL
            os.close(reader)
            found = find_whole(paths)[0]
            assert found.moment.step >= int(said.split()[-1]), f"trial {trial}"
            (state,) = found.read()
            assert state["step"] == found.moment.step
            assert all((tensor == found.moment.step).all() for tensor in state["tensors"])
            newest = found.moment.step
    assert newest > 50


def test_nobody_writes_over_the_last_whole_snapshot_before_all_have_a_newer_one() -> None:
    with memories(4) as paths:
        first, second = Snapshots(paths[:2]), Snapshots(paths[2:])
        for snapshots, index in ((first, 0), (second, 1)):
            take(snapshots, 1, index=index, count=2)
        take(first, 2, index=0, count=2)  # the other one died before it had its part
        assert steps(paths) == [1]
        assert not second._slots[1 - second._latest].label()
        take(first, 3, index=0, count=2, whole=False)
        take(second, 3, index=1, count=2)
        assert steps(paths) == [3, 1]
        take(first, 4, index=0, count=2)
        assert steps(paths) == [3]
        for index, part in enumerate(find_whole(paths)[0].read()):
            assert part["step"] == 3, index


def test_a_rank_that_comes_back_spares_the_snapshot_that_the_others_may_need() -> None:
    with memories(2) as paths:
        take(Snapshots(paths), 1)
        (found,) = find_whole(paths)
        for step in (2, 3):
            back = Snapshots(paths)
            back.keep(found.moment)
            take(back, step, whole=False)
            assert steps(paths) == [step, 1]


def test_of_two_snapshots_after_the_same_step_the_later_one_is_found() -> None:
    for order in (1, -1):  # of the slots in which they come to lie
        with memories(4) as paths:
            ranks = Snapshots(paths[:2][::order]), Snapshots(paths[2:])
            for operation in (7, 9):  # between them, somebody was given a stream
                for index, snapshots in enumerate(ranks):
                    label = Label(Moment(0, 3, operation), index, len(ranks))
                    snapshots.begin(label, {"operation": operation}, latest_is_whole=True, at_once=True)
            found = find_whole(paths)
            assert [each.moment.operation for each in found] == [9, 7]
            assert [part["operation"] for each in found for part in each.read()] == [9, 9, 7, 7]


def test_what_changes_while_it_is_copied_is_no_snapshot() -> None:
    with memories(2) as paths:
        snapshots, weight = Snapshots(paths), torch.zeros(100)
        snapshots.begin(Label(Moment(0, 1), 0, 1), {"weight": weight}, deferred=[weight], latest_is_whole=True)
        weight += 1
        snapshots.fence()
        assert steps(paths) == []
        assert not snapshots.is_latest_whole
        take(snapshots, 2)
        assert snapshots.is_latest_whole


def test_what_is_read_can_be_changed_without_changing_the_snapshot() -> None:
    with memories(2) as paths:
        take(Snapshots(paths), 1)
        (found,) = find_whole(paths)
        found.read()[0]["weight"] += 1
        assert (found.read()[0]["weight"] == 1).all()


def test_without_memory_the_snapshot_before_stays_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with memories(2) as paths:
        snapshots = Snapshots(paths)
        take(snapshots, 1)

        def refuse(*args: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        for step in (2, 3):
            take(snapshots, step, whole=snapshots.is_latest_whole)
        assert steps(paths) == [1]
        assert caplog.text.count("No snapshot of step 2 in memory") == 1
        assert "step 3" not in caplog.text
        monkeypatch.undo()
        take(snapshots, 4, whole=snapshots.is_latest_whole)
        assert steps(paths) == [4, 1]


@pytest.mark.parametrize("length", [0, 7, 71, 300, 4000])
def test_a_slot_that_was_cut_off_is_not_read(tmp_path: Path, length: int) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).touch()
    take(Snapshots(paths), 1)
    (found,) = find_whole(paths)
    (path,) = [path for path in paths if SharedSlot(path).label() is not None]
    os.truncate(path, length)
    with ExitStack() as stack:
        if find_whole(paths):
            stack.enter_context(pytest.raises(ValueError, match=r"holds a state whose|ends at byte"))
            found.read()
    assert length < 100 or find_whole(paths)


def test_memory_is_gone_with_the_process_that_made_it() -> None:
    before = set(os.listdir("/dev/shm"))
    with memories(2) as paths:
        take(Snapshots(paths), 1)
        named = {name for name in set(os.listdir("/dev/shm")) - before if "lightning_ft" in name}
        assert not named
    assert not any(os.path.exists(path) and "memfd:lightning_ft" in os.readlink(path) for path in paths)
