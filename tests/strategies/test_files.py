import os

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_ft.strategies.files import write_atomically


class FailsHalfway(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        with open(path, "wb") as file:
            file.write(b"half of it")
        raise OSError(28, "No space left on device")


def test_checkpoint_replaces_the_older_one_and_leaves_nothing_else(tmp_path):
    for step in (1, 2):
        write_atomically(TorchCheckpointIO(), {"step": step}, tmp_path / "last.ckpt", None)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt") == {"step": 2}


def test_write_that_fails_leaves_the_older_checkpoint_as_it_was(tmp_path):
    write_atomically(TorchCheckpointIO(), {"step": 1}, tmp_path / "last.ckpt", None)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(FailsHalfway(), {"step": 2}, tmp_path / "last.ckpt", None)
    assert torch.load(tmp_path / "last.ckpt") == {"step": 1}


def test_write_that_fails_leaves_no_half_file_behind(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        write_atomically(FailsHalfway(), {"step": 1}, tmp_path / "last.ckpt", None)
    assert os.listdir(tmp_path) == []
