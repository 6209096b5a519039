import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_ft.checkpoint.layout import MANIFEST, FileEntry
from lightning_ft.checkpoint.verify import Share, verify
from lightning_ft.errors import DamagedCheckpointError

FILES = [".metadata", "__0_0.distcp", "meta.pt", "rank-00000.state", MANIFEST]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lose(path: Path) -> None:
    path.unlink()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [_flip, _zero, _truncate, _empty, _lose, _loop, _replace_by_directory]


def test_an_intact_checkpoint_passes(save: Callable[..., Path]) -> None:
    manifest = verify(save())
    assert manifest is not None
    assert manifest.step == 2
    assert manifest.num_bytes > 100_000


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_named(save: Callable[..., Path], name: str, damage: Callable[[Path], None]) -> None:
    directory = save()
    damage(directory / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name}.*Nothing was loaded"):
        verify(directory)


def test_a_file_of_another_checkpoint_is_found(save: Callable[..., Path]) -> None:
    directory, other = save(), save("step=3.ckpt", step=3)
    shutil.copy(other / "meta.pt", directory / "meta.pt")
    with pytest.raises(DamagedCheckpointError, match=r"meta\.pt"):
        verify(directory)
    shutil.copy(other / MANIFEST, directory / MANIFEST)
    shutil.copy(directory / "rank-00000.state", directory / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp has"):
        verify(directory)


def test_an_empty_directory_a_file_and_nothing_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "text.ckpt").write_text("weights")
    for name in ("empty.ckpt", "text.ckpt", "none.ckpt"):
        with pytest.raises(DamagedCheckpointError, match=name):
            verify(tmp_path / name)


def test_sizes_alone_read_small_files_only(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ft.checkpoint.verify._SMALL", 50_000)
    directory = save()
    _flip(directory / "__0_0.distcp")
    verify(directory, "sizes")
    _flip(directory / ".metadata")
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata"):
        verify(directory, "sizes")


def test_ranks_divide_all_files_among_them_evenly() -> None:
    entries = [FileEntry(str(index), size, "") for index, size in enumerate([100, 90, 40, 30, 20, 0, 0])]
    shares = [Share(index, 3).of(entries) for index in range(3)]
    assert sorted(entry.path for share in shares for entry in share) == sorted(entry.path for entry in entries)
    assert [sum(entry.size for entry in share) for share in shares] == [100, 90, 90]


def test_files_of_torch_save_are_checked_as_far_as_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "single.ckpt"
    torch.save({"state_dict": {"weight": torch.arange(1000.0)}}, path)
    verify(path)
    for damage in (_zero, _truncate, _empty):
        copy = tmp_path / "copy.ckpt"
        shutil.copy(path, copy)
        damage(copy)
        with pytest.raises(DamagedCheckpointError, match=r"copy\.ckpt"):
            verify(copy)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 77] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="damaged in"):
        verify(path)
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    verify(path)


def test_a_checkpoint_of_torch_alone_is_checked_by_its_lengths(save: Callable[..., Path]) -> None:
    directory = save()
    for name in (MANIFEST, "rank-00000.state"):
        (directory / name).unlink()
    assert verify(directory) is None
    _truncate(directory / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp has \d+ bytes, and tensors up to"):
        verify(directory)


def test_metadata_that_would_run_code_is_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    import pickle

    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    directory = save()
    for name in (MANIFEST, "rank-00000.state"):
        (directory / name).unlink()
    (directory / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(DamagedCheckpointError, match=r"it asks for posix\.mkdir"):
        verify(directory)
    assert not (tmp_path / "owned").exists()
