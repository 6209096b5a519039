import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed import HashStore

from lightning_ft.checkpoint.commit import Commit, Post, Table
from lightning_ft.checkpoint.layout import MANIFEST, FileEntry, Manifest
from lightning_ft.checkpoint.peers import Roll, StorePeers
from lightning_ft.checkpoint.plan import Entry, Seat
from lightning_ft.checkpoint.staging import LocalStaging, move_into_place
from lightning_ft.errors import CheckpointNotCommittedError

ENTRY = Entry("state_dict.w", torch.float32, (2,), (0,), (2,))


class Mortals(StorePeers):
    """Ranks in threads, of which the test says who died."""

    def __init__(self, store: HashStore, rank: int, dead: set[int]) -> None:
        super().__init__(store, rank, 3, "run")
        self._dead = dead

    def lost(self, roll: Roll) -> frozenset[int]:
        return frozenset(self._dead)


class Save:
    """One save of three ranks."""

    def __init__(self, root: Path) -> None:
        self.root, self.target = root, root / "new.ckpt"
        self.staging = LocalStaging(self.target, "x").directory
        self.store, self.dead = HashStore(), set[int]()
        self.ended: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def commit(self, rank: int, seconds: float = 60.0) -> Commit:
        manifest = Manifest(step=7, epoch=0, run_id="run", world_size=3, shard_size=1, files=())
        roll = Roll("token", Seat(rank, 3))
        peers = Mortals(self.store, rank, self.dead)
        return Commit(peers, roll, LocalStaging(self.target, "x"), manifest, {}, timedelta(seconds=seconds))

    def write(self, rank: int) -> Post:
        self.staging.mkdir(exist_ok=True)
        (self.staging / f"{rank}.distcp").write_bytes(b"%d" % rank)
        peers = Mortals(self.store, rank, self.dead)
        table = Table("0.distcp", (ENTRY,), ((0, 8),)) if rank == 0 else Table(f"{rank}.distcp", (), ())
        peers.post(f"table/{rank}", table.to_bytes())
        files = (FileEntry(f"{rank}.distcp", 1, xxhash.xxh3_64_hexdigest(b"%d" % rank)),)
        return Post(files, f"table/{rank}", target=str(self.target))

    def run(self, rank: int, post: Post, seconds: float = 60.0) -> None:
        commit = self.commit(rank, seconds)

        def settle() -> None:
            try:
                self.ended[rank] = commit.settle(post)
            except CheckpointNotCommittedError as error:
                self.ended[rank] = error

        self.threads.append(threading.Thread(target=settle))
        self.threads[-1].start()

    def join(self) -> dict[int, Any]:
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return self.ended


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return Save(tmp_path)


def test_a_checkpoint_is_there_once_all_ranks_wrote_and_not_before(save: Save) -> None:
    posts = [save.write(rank) for rank in range(3)]
    save.run(0, posts[0])
    save.run(2, posts[2])
    assert not save.target.exists()
    save.run(1, posts[1])
    assert save.join() == {0: True, 1: False, 2: False}
    manifest = Manifest.from_bytes((save.target / MANIFEST).read_bytes())
    assert [file.path for file in manifest.files] == ["0.distcp", "1.distcp", "2.distcp", ".metadata"]
    assert [path.name for path in save.root.iterdir()] == ["new.ckpt"]


@pytest.mark.parametrize(
    ("prepare", "reason", "because_of_death"),
    [
        (lambda save: save.run(1, Post(error="no space left on device")), r"rank 1 failed \(no space left", False),
        (lambda save: save.dead.add(1), "rank 1 died before writing its part", True),
        (lambda save: None, "rank 1 did not write within 0.2 s", False),
    ],
    ids=["failed", "died", "late"],
)
def test_a_save_that_one_rank_does_not_write_is_dropped_by_all_and_nothing_is_left(
    save: Save, prepare: Callable[[Save], None], reason: str, because_of_death: bool
) -> None:
    posts = {rank: save.write(rank) for rank in (0, 2)}
    prepare(save)
    for rank, post in posts.items():
        save.run(rank, post, seconds=0.2)
    for rank, error in save.join().items():
        assert isinstance(error, CheckpointNotCommittedError), f"rank {rank}"
        with pytest.raises(CheckpointNotCommittedError, match=f"step 7 was not committed: {reason}"):
            raise error
        assert error.because_of_death == because_of_death
    assert list(save.root.iterdir()) == []


def test_who_died_after_writing_does_not_keep_the_others_from_committing_not_even_the_one_who_decides(save: Save) -> None:
    for rank in (0, 1):
        Mortals(save.store, rank, save.dead).post(f"save/token/{rank}", save.write(rank).to_bytes())
    save.dead |= {0, 1}
    save.run(2, save.write(2))
    assert save.join() == {2: True}
    assert (save.target / MANIFEST).exists()


def test_who_takes_over_finds_what_was_committed_by_one_that_died_before_it_could_say_so(save: Save) -> None:
    posts = [save.write(rank) for rank in range(3)]
    commit = save.commit(0)
    for rank, post in enumerate(posts):
        commit._peers.post(f"save/token/{rank}", post.to_bytes())
    assert commit._decide(frozenset(), float("inf")) == b""
    committed = (save.target / MANIFEST).read_bytes()
    save.dead.add(0)
    for rank in (1, 2):
        save.run(rank, posts[rank])
    assert save.join() == {1: True, 2: False}
    assert (save.target / MANIFEST).read_bytes() == committed
    assert json.loads(committed)["step"] == 7


def test_ranks_that_name_it_differently_make_no_checkpoint(save: Save) -> None:
    for rank in range(3):
        post = save.write(rank)
        save.target = save.root / ("new.ckpt" if rank < 2 else "other.ckpt")
        save.run(rank, post)
    errors = save.join()
    assert {type(error) for error in errors.values()} == {CheckpointNotCommittedError}
    assert "different names" in str(errors[2])
    assert "other.ckpt" in str(errors[0])
    assert not list(save.root.iterdir())


def test_a_file_that_is_not_there_as_it_was_written_makes_no_checkpoint(save: Save) -> None:
    posts = [save.write(rank) for rank in range(3)]
    (save.staging / "1.distcp").unlink()
    for rank in range(3):
        save.run(rank, posts[rank])
    assert {type(error) for error in save.join().values()} == {CheckpointNotCommittedError}
    assert not list(save.root.iterdir())


def test_what_has_the_name_already_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    for old in ("directory", "file", "link"):
        target, staging = tmp_path / f"{old}.ckpt", tmp_path / ".tmp-x"
        staging.mkdir()
        (staging / "new").touch()
        if old == "directory":
            target.mkdir()
        elif old == "file":
            target.write_text("old")
        else:
            target.symlink_to(tmp_path / "directory.ckpt")
        move_into_place(staging, target)
        assert [path.name for path in target.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory.ckpt", "file.ckpt", "link.ckpt"]
