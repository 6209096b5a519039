import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.checkpoint.layout import MANIFEST
from lightning_ft.checkpoint.reader import candidates, check, newest_valid
from lightning_ft.errors import DamagedCheckpointError


@dataclass
class Table:
    """Where threads that stand for ranks exchange values."""

    size: int
    barrier: threading.Barrier = field(init=False)
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.values = [None] * self.size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class Seat:
    rank: int
    table: Table

    @property
    def size(self) -> int:
        return self.table.size

    def broadcast(self, value: Any) -> Any:
        return self.table.exchange(self.rank, value)[0]

    def first_problem(self, problem: str | None) -> str | None:
        return next((text for text in self.table.exchange(self.rank, problem) if text), None)


def test_the_newest_intact_one_is_found_and_others_are_named(
    save: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = save("a.ckpt", step=1), save("z.ckpt", step=2)
    third, fourth = save("b.ckpt", step=3), save("y.ckpt", step=4)
    assert [Path(candidate.path) for candidate in candidates(tmp_path)] == [fourth, third, second, first]
    assert newest_valid([tmp_path]) == str(fourth)
    (fourth / MANIFEST).unlink()
    os.truncate(third / "__0_0.distcp", 10)
    with caplog.at_level(logging.WARNING):
        assert newest_valid([tmp_path]) == str(second)
    assert "y.ckpt: manifest.json is missing" in caplog.text
    assert "b.ckpt: __0_0.distcp has 10 bytes instead of" in caplog.text


def test_what_is_half_written_half_removed_or_no_checkpoint_is_not_looked_at(
    save: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_valid([tmp_path, tmp_path / "none"]) is None
    good = save("a.ckpt")
    for name in (".tmp-b.ckpt-1", ".trash-b.ckpt-1"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "lightning_logs").mkdir()
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    (tmp_path / "gone.ckpt").symlink_to("nowhere")
    assert [os.path.realpath(candidate.path) for candidate in candidates(tmp_path)] == [str(good)]
    (tmp_path / "empty.ckpt").mkdir()
    assert os.path.realpath(newest_valid([tmp_path]) or "") == str(good)
    assert "empty.ckpt" in caplog.text


def test_single_files_and_directories_are_ordered_together(save: Callable[..., Path], tmp_path: Path) -> None:
    directory = save("a.ckpt")
    torch.save({"global_step": 9}, tmp_path / "b.ckpt")
    assert newest_valid([tmp_path]) == str(tmp_path / "b.ckpt")
    os.utime(tmp_path / "b.ckpt", (1, 1))
    assert newest_valid([tmp_path]) == str(directory)


def test_all_ranks_find_the_same_whichever_of_them_sees_the_damage(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = save("a.ckpt"), save("b.ckpt")
    (bad / "meta.pt").unlink()
    read: list[tuple[str, int]] = []
    from lightning_ft.checkpoint import verify

    check_entry = verify._check_entry

    def count(directory: Path, entry: Any, *rest: Any) -> None:
        read.append((directory.name, entry.size))
        check_entry(directory, entry, *rest)

    monkeypatch.setattr(verify, "_check_entry", count)
    table = Table(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda rank: newest_valid([tmp_path if rank == 0 else "elsewhere"], Seat(rank, table)), range(3))
        )
    assert found == [str(good)] * 3
    assert len([name for name, _ in read if name == "a.ckpt"]) == 4  # every file once, not once a rank


def test_when_a_rank_dies_the_others_check_its_share_too(save: Callable[..., Path]) -> None:
    class Shrinking:
        rank, size = 0, 2

        def broadcast(self, value: Any) -> Any:
            return value

        def first_problem(self, problem: str | None) -> str | None:
            self.size = 1
            return problem

    directory = save()
    share_of_the_dead = directory / "meta.pt"
    share_of_the_dead.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"meta\.pt is missing"):
        check(str(directory), Shrinking())
