import multiprocessing
import os
import signal
from pathlib import Path

from lightning_ft.checkpoint.leftovers import claim, collect, discard


def _hold(staging: Path, connection: "multiprocessing.connection.Connection") -> None:
    claim(staging)
    connection.send("held")
    signal.pause()


def test_leftovers_of_the_dead_are_collected_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    for name in (".tmp-a-1", ".tmp-b-2", ".trash-c-3", "step=1.ckpt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".tmp-link").symlink_to("step=1.ckpt")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    writer = context.Process(target=_hold, args=(tmp_path / ".tmp-a-1", there))
    writer.start()
    try:
        assert here.poll(60)
        assert collect(tmp_path) == [".tmp-b-2", ".trash-c-3"]
        assert (tmp_path / ".tmp-a-1" / "file").exists()
    finally:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    assert collect(tmp_path) == [".tmp-a-1"]
    assert sorted(os.listdir(tmp_path)) == [".tmp-link", "step=1.ckpt"]
    assert collect(tmp_path / "none") == []


def test_directories_files_and_links_are_discarded_but_not_what_links_lead_to(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "c.ckpt").write_text("x")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    for name in ("last.ckpt", "b.ckpt", "c.ckpt"):
        discard(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]
    assert (tmp_path / "a.ckpt" / "file").exists()
