"""The kernel's counters of out-of-memory kills, as version 2, version 1 and no control group show them."""

from pathlib import Path

import pytest

from lightning_ft.supervision.memory import OutOfMemoryKills


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("0::/user.slice/job\n", "sys/fs/cgroup/user.slice/job/memory.events"),
        ("0::/../outside\n", "sys/fs/cgroup/memory.events"),
        ("4:memory:/job\n1:cpu:/\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("4:memory:/outside\n", "sys/fs/cgroup/memory/memory.oom_control"),
        ("1:cpu:/\n", "proc/vmstat"),
    ],
)
def test_a_kill_for_want_of_memory_is_noticed_once(groups: str, counter: str, tmp_path: Path) -> None:
    for name, text in (("proc/self/cgroup", groups), ("proc/vmstat", "nr_free 7\noom_kill 1\n"), (counter, "oom_kill 4\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kills = OutOfMemoryKills(tmp_path)
    assert not kills.has_risen()
    (tmp_path / counter).write_text("low 0\noom_kill 5\n")
    assert kills.has_risen()
    assert not kills.has_risen()


def test_a_machine_that_does_not_count_has_none(tmp_path: Path) -> None:
    assert not OutOfMemoryKills(tmp_path).has_risen()


def test_this_machine_can_be_asked() -> None:
    assert OutOfMemoryKills().has_risen() in (True, False)
