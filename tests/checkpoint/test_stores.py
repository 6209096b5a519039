"""Checkpoints in stores that can't rename, of one process; S3 is a real server."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ft.checkpoint import load_training_metadata, load_training_state, process_saver, save_training_state
from lightning_ft.checkpoint import store_leftovers as leftovers
from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.dcp_reading import content_directory
from lightning_ft.checkpoint.layout import MANIFEST, Manifest
from lightning_ft.checkpoint.leftovers import collect
from lightning_ft.checkpoint.peers import SoloPeers
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.reader import candidates, newest_valid
from lightning_ft.checkpoint.staging import PublishInDoubtError, StoreStaging
from lightning_ft.checkpoint.store_path import StorePath, follow, is_store, local_form, place, relative_to
from lightning_ft.checkpoint.verify import damage, verify
from lightning_ft.cli import main
from lightning_ft.errors import CheckpointNotCommittedError, DamagedCheckpointError, StoreUnreachableError


@pytest.fixture(autouse=True, scope="module")
def _no_writer_is_left() -> Iterator[None]:
    yield
    process_saver.close()


@pytest.fixture
def memory() -> Iterator[StorePath]:
    root = StorePath("memory://checkpoints")
    root.remove()
    yield root
    root.remove()


def training(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module(torch.randn(16, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def assert_alike(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    else:
        assert one == other


def content(step: int, value: float = 1.0) -> Content:
    state = {"state_dict": {"w": torch.full((1000,), value)}}
    manifest = Manifest(step=step, epoch=0, run_id="run", world_size=1, shard_size=1, files=())
    return Content(state, lambda seat: {"meta.pt": b"%d" % step}, manifest)


def files(root: StorePath) -> list[str]:
    """Return all that lies below, without the names that are new in every save."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in root.entries():
            found += [f"{entry.path.name}/{name}" for name in files(entry.path)] if entry.is_directory else [entry.path.name]
    return sorted("*" + name[name.index("/") :] if name.startswith(".data-") else name for name in found)


def command(*words: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ckpt", *words])


ONE = ["*/.metadata", "*/__0_0.distcp", "*/rank-00000.state", "*/training.state", "manifest.json"]


def test_credentials_that_are_set_after_a_save_reach_the_process_that_writes(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = training()
    process_saver.close()
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        save_training_state(module, optimizer, tmp_path / "a", step=1)
    save_training_state(module, optimizer, f"{bucket}/run/a", step=1)
    assert newest_valid([f"{bucket}/run"]) is not None


def test_a_training_is_saved_in_a_store_replaced_found_again_and_goes_on_from_there(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, optimizer = training()
    save_training_state(module, optimizer, f"{bucket}/run/a", step=1)
    for _ in range(2):  # the second one in place of the first, and of another one that it was told to replace
        save_training_state(module, optimizer, f"{bucket}/run/b", step=2, replaces=[f"{bucket}/run/a"])
    assert files(StorePath(f"{bucket}/run")) == [f"b/{name}" for name in ONE]
    other, its_optimizer = training(seed=1)
    assert load_training_metadata(f"{bucket}/run/b").step == 2
    assert load_training_state(other, its_optimizer, f"{bucket}/run/b").step == 2
    assert_alike(other.state_dict(), module.state_dict())
    assert_alike(its_optimizer.state_dict(), optimizer.state_dict())

    save_training_state(module, optimizer, f"{bucket}/run/c", step=3)
    command("ls", f"{bucket}/run")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["c", "3"], ["b", "2"]]
    command("verify", f"{bucket}/run")
    assert capsys.readouterr().out.splitlines() == [f"{bucket}/run/{name}: intact" for name in ("c", "b")]
    command("export", "--safetensors", f"{bucket}/run/c", str(tmp_path / "out"))
    command("rm", f"{bucket}/run/b")
    assert files(StorePath(f"{bucket}/run")) == [f"c/{name}" for name in ONE]
    with pytest.raises(SystemExit, match="is no checkpoint"):
        main(["ckpt", "rm", f"{bucket}/run"])


def flip(path: StorePath) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: flip(content_directory(path) / "__0_0.distcp"), "__0_0.distcp has another content"),
        (lambda path: flip(content_directory(path) / ".metadata"), ".metadata has another content"),
        (lambda path: (content_directory(path) / "meta.pt").unlink(), "meta.pt is missing"),
        (lambda path: (content_directory(path) / "meta.pt").write_bytes(b""), "meta.pt has 0 bytes instead of 1"),
        (lambda path: flip(path / MANIFEST), "manifest.json"),
    ],
    ids=["flipped", "metadata", "missing", "emptied", "manifest"],
)
def test_damage_is_found_and_the_one_before_taken(
    memory: StorePath, harm: Callable[[StorePath], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncSaver(SoloPeers())
    for step in (1, 2):
        saver.save(memory / f"{step}.ckpt", content(step)).wait()
    saver.close()
    assert newest_valid([memory]) == str(memory / "2.ckpt")
    harm(memory / "2.ckpt")
    assert reason in str(damage(memory / "2.ckpt"))
    with caplog.at_level(logging.WARNING):
        assert newest_valid([memory]) == str(memory / "1.ckpt")
    assert f"{memory}/2.ckpt" in caplog.text
    assert reason in caplog.text


def test_what_has_no_manifest_yet_is_no_checkpoint_whatever_lies_there(memory: StorePath) -> None:
    staging = StoreStaging(memory / "1.ckpt", "token", timedelta(seconds=60))
    leave = staging.enter()
    staging.write(".metadata", b"all was written")
    assert candidates(memory) == []
    assert candidates(memory / "1.ckpt") == []
    with pytest.raises(DamagedCheckpointError, match="it is no checkpoint"):
        verify(memory / "1.ckpt")
    assert collect(memory) == []  # this process may go on with it
    leave()
    assert collect(memory) == [str(staging.directory)]
    assert not memory.exists()


def test_leftovers_are_collected_once_nobody_lives_who_writes_them(
    memory: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver(SoloPeers())
    saver.save(memory / "1.ckpt", content(1)).wait()
    saver.close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = {"machine": leftovers._machine(), "pid": process.pid, "started": leftovers._started(process.pid)}
        claims = {
            "lives": json.dumps(owner),
            "another": json.dumps({**owner, "started": "1"}),  # a process of this number, but not that one
            "elsewhere": json.dumps({**owner, "machine": "another one"}),
            "unreadable": "{",
        }
        for name, claim in claims.items():
            for target in ("1.ckpt", "2.ckpt"):
                (memory / target / f".data-{name}" / ".claim-1").write_bytes(claim.encode())
                (memory / target / f".data-{name}" / "__0_0.distcp").write_bytes(b"part")
        assert {path[-7:] for path in collect(memory)} == {"another"}
        process.communicate(b"\n")
    assert {path[-5:] for path in collect(memory)} == {"lives"}
    monkeypatch.setattr(leftovers, "_LONGEST_SILENCE", -1.0)  # as if it were a day later
    assert {path.rpartition("-")[2] for path in collect(memory)} == {"elsewhere", "unreadable"}
    assert damage(memory / "1.ckpt") is None
    assert files(memory) == [f"1.ckpt/{name}" for name in ("*/.metadata", "*/__0_0.distcp", "*/meta.pt", MANIFEST)]


def test_a_twin_is_copied_by_the_store_and_outlives_the_one_that_it_was_copied_from(bucket: str) -> None:
    saver = AsyncSaver(SoloPeers(), max_pending=2)
    first = saver.save(f"{bucket}/1.ckpt", content(1))
    saver.save(f"{bucket}/last.ckpt", content(1), twin_of=first).wait()
    saver.save(f"{bucket}/2.ckpt", content(2, 2.0), replaces=[StorePath(f"{bucket}/1.ckpt")]).wait()
    saver.close()
    assert [candidate.path for candidate in candidates(bucket)] == [f"{bucket}/2.ckpt", f"{bucket}/last.ckpt"]
    assert damage(f"{bucket}/last.ckpt") is None


def test_a_store_that_refuses_is_told_and_no_reason_to_begin_anew(
    bucket: str, monkeypatch: pytest.MonkeyPatch, memory: StorePath
) -> None:
    saver = AsyncSaver(SoloPeers())
    with pytest.raises(CheckpointNotCommittedError, match="bucket does not exist"):
        saver.save(f"{bucket}-other/1.ckpt", content(1)).wait()
    saver.save(memory / "1.ckpt", content(1)).wait()
    saver.close()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Access Denied")

    store = memory._in_store[0]
    for name in ("info", "ls", "cat_file"):
        with monkeypatch.context() as patch:
            patch.setattr(type(store), name, refuse)
            with pytest.raises(StoreUnreachableError, match=r"`memory://.*` could not be reached: Access Denied\."):
                newest_valid([memory])
    assert newest_valid([memory]) == str(memory / "1.ckpt")


def test_a_store_that_does_not_answer_is_given_up_and_what_arrives_late_is_whole(object_store: Any, bucket: str) -> None:
    target, patience = StorePath(f"{bucket}/1.ckpt"), timedelta(seconds=0.5)
    manifest = Manifest(step=1, epoch=0, run_id="run", world_size=1, shard_size=1, files=())
    first = StoreStaging(target, "first", patience)
    entry = first.write("meta.pt", b"1")
    os.kill(object_store.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PublishInDoubtError, match=r"no answer within 0\.5 s"):
            first.publish(Manifest(**{**vars(manifest), "files": (entry,)}))
        with pytest.raises(StoreUnreachableError, match="an earlier request is not answered yet"):
            first.publish(manifest)  # which the late one would take the place of
    finally:
        os.kill(object_store.process.pid, signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "lightning_ft-store":
            thread.join(60.0)
    assert damage(target) is None
    second = StoreStaging(target, "second", timedelta(seconds=60))
    second.write("meta.pt", b"2")
    second.publish(Manifest(**{**vars(manifest), "step": 2}))
    assert content_directory(target) == second.directory
    assert files(target) == ["*/meta.pt", MANIFEST]


def test_paths_lead_from_one_place_to_another(tmp_path: Path) -> None:
    assert not any(map(is_store, ("/a/b", "a", "file:///a", "local://a")))
    assert is_store("s3://a/b")
    assert local_form("file:///a/b") == "/a/b"
    assert place(f"file://{tmp_path}") == place(tmp_path) == tmp_path
    one = StorePath("s3://bucket/run/val/x=1.ckpt/")
    assert (str(one), one.name, str(one.parent)) == ("s3://bucket/run/val/x=1.ckpt", "x=1.ckpt", "s3://bucket/run/val")
    assert one.parent.parent.parent == one.parent.parent.parent.parent == StorePath("s3://bucket")
    for first, second, way in (
        ("s3://bucket/run/a", "s3://bucket/run", "a"),
        ("s3://bucket/run/a/b", "s3://bucket/run/c", "../a/b"),
        ("/run/a/b", "/run/c", "../a/b"),
    ):
        assert relative_to(place(first), place(second)) == way
        assert follow(place(second), way) == place(first)
    assert relative_to(place("gs://bucket/a"), place("s3://bucket")) is None
    assert relative_to(place("/bucket/a"), place("s3://bucket")) is None
