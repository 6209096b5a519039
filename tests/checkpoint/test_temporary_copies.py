import os
import signal
import tempfile
from pathlib import Path

import pytest

from lightning_ft.checkpoint.temporary_copies import hold, make_directory


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_killed_process_left_goes_with_the_next_one_and_what_a_living_one_holds_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = make_directory()
    release = hold(held)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = make_directory()
        hold(left)
        Path(left, "part").write_bytes(b"of a checkpoint")
        os.write(writer, left.encode())
        signal.pause()
    left = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    (tmp_path / "lightning_ft-copy-link").symlink_to(tmp_path)
    foreign = Path(tempfile.mkdtemp(prefix="another-copy-"))

    for directory in (held, left):
        os.utime(directory, (0, 0))
    assert set(os.listdir(make_directory())) == set()
    assert Path(left, "part").exists()  # its process lives
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    make_directory()
    assert not os.path.exists(left)
    assert os.path.isdir(held)
    assert foreign.is_dir()
    release()
    make_directory()
    assert not os.path.exists(held)


def test_who_made_one_just_now_has_the_time_to_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = make_directory()
    make_directory()  # of another process, which starts at the same time
    assert os.path.isdir(first)
