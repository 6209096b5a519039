"""Checkpoints of modules that are sharded over the ranks of replicas: whole, written once, and loaded by whoever asks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_ft.checkpoint.dcp_reading import read_metadata, storage_files
from lightning_ft.checkpoint.export import export_checkpoint
from lightning_ft.checkpoint.lightning_dict import read_checkpoint
from lightning_ft.checkpoint.verify import read_manifest, verify
from lightning_ft.testing import JobResult, run_job

JOB = Path(__file__).parent / "jobs" / "sharded_saves.py"


def run(directory: Path, **options: Any) -> JobResult:
    return run_job(JOB, [json.dumps(options)], num_slots=options["devices"], directory=directory, timeout=200.0)


def assert_alike(first: Any, second: Any, where: str = "") -> None:
    """Bit for bit, whatever the nesting."""
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            assert_alike(value, second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, value in enumerate(first):
            assert_alike(value, second[index], f"{where}.{index}")
    else:
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second, where


def trained(checkpoint: dict[str, Any]) -> dict[str, Any]:
    assert all(type(value) is torch.Tensor for value in checkpoint["state_dict"].values())
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def load(path: Path) -> dict[str, Any]:
    return trained(read_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=False))


def assert_written_once(path: Path, num_ranks: int) -> None:
    """All of every tensor, and no part of it twice; every rank wrote a share."""
    metadata = read_metadata(path)
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in described.chunks) == described.size.numel(), name
    assert len(storage_files(metadata)) == num_ranks


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    job = run(tmp_path_factory.mktemp("two_by_two"), devices=4, shard_size=2)
    job.check()
    return job


def test_two_replicas_of_two_write_everything_once_and_resume_bit_for_bit(two_by_two: JobResult, tmp_path: Path) -> None:
    directory = two_by_two.directory
    for step in (2, 4, 6):
        path = directory / "first" / f"step={step}.ckpt"
        verify(path)
        assert_written_once(path, 4)
        manifest = read_manifest(path)
        assert (manifest.step, manifest.world_size, manifest.shard_size) == (step, 4, 2)
    last = load(directory / "first" / "step=6.ckpt")
    assert_alike(load(directory / "resumed" / "step=6.ckpt"), last)
    assert_alike(load(directory / "after.ckpt"), last)
    assert_alike(load(directory / "after_as_directory.ckpt"), last)
    assert_written_once(directory / "after_as_directory.ckpt", 2)
    export_checkpoint(directory / "first" / "step=6.ckpt", tmp_path / "exported.ckpt", weights_only=False)
    assert_alike(load(tmp_path / "exported.ckpt"), last)


def test_a_rank_killed_while_it_writes_costs_that_save_and_the_next_step_is_saved(two_by_two: JobResult) -> None:
    # The other rank of its replica is started again, too, perhaps before it wrote.
    message = r"checkpoint of step 4 was not committed: (rank 3|ranks 2, 3) died before writing its part. Still intact: "
    assert len(re.findall(message, two_by_two.stderr)) == 1
    killed = two_by_two.directory / "killed"
    steps = {int(path.stem.removeprefix("step=")) for path in killed.iterdir()}
    assert 4 not in steps
    assert {2, 6} <= steps
    assert 5 in steps, "in place of the one that was lost"
    for path in killed.iterdir():
        verify(path)
        assert_written_once(path, read_manifest(path).world_size)


def test_all_ranks_as_one_replica_take_over_what_two_saved_and_stop_in_a_validation_with_a_whole_file(
    two_by_two: JobResult, tmp_path: Path
) -> None:
    source = two_by_two.directory / "first" / "step=2.ckpt"
    job = run(tmp_path, devices=3, shard_size="all", resume=str(source))
    assert job.returncode == 143, job.tail()
    assert_alike(load(tmp_path / "again.ckpt"), load(source))
    assert_written_once(tmp_path / "again.ckpt", 3)
    assert_alike(load(tmp_path / "resumed" / "last-preempted.ckpt"), load(tmp_path / "resumed" / "step=4.ckpt"))
