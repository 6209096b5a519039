"""Shards that move to another number of ranks, over real gloo groups in real processes."""

import json
from pathlib import Path

from lightning_ft.testing import run_without_supervisor

JOB = Path(__file__).parent / "jobs" / "resharding.py"


def test_ranks_that_go_on_from_a_snapshot_equal_ranks_that_started_from_it_bit_for_bit(tmp_path: Path) -> None:
    run_without_supervisor(JOB, [str(tmp_path)], num_ranks=3, directory=tmp_path, timeout=120).check()
    for rank in range(3):
        for case, told in json.loads((tmp_path / f"told_{rank}.json").read_text()).items():
            assert told.pop("losses", [1.0])
            assert all(told.values()), f"{case} on rank {rank}: {told}"
            assert len(told) == (9 if rank < 2 else 4), f"{case} on rank {rank}: {told}"
