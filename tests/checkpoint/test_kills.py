"""What is there after SIGKILL at random moments of ranks that save all the time."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed import TCPStore

from lightning_ft.checkpoint.dcp_reading import content_directory
from lightning_ft.checkpoint.layout import MANIFEST, Manifest
from lightning_ft.checkpoint.leftovers import collect
from lightning_ft.checkpoint.reader import candidates
from lightning_ft.checkpoint.store_path import Place, StorePath, place
from lightning_ft.testing.processes import Process, children, fork_server

JOB = Path(__file__).parent / "jobs" / "save_all_the_time.py"
TRIALS = int(os.environ.get("LIGHTNING_FT_TEST_KILLS", "4"))


class Ranks:
    """Two ranks in processes of their own."""

    def __init__(self, directory: Path, root: Place, start: int) -> None:
        self.outputs = [directory / f"{start}-{rank}.out" for rank in range(2)]
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            fork_server().start(
                [str(JOB), str(rank), "2", str(self.store.port), str(root), str(start)],
                environ,
                directory,
                self.outputs[rank],
                directory / f"{start}-{rank}.err",
            )
            for rank in range(2)
        ]

    def acknowledged(self) -> int:
        """The last step of which some rank was told that it is committed; -1 if there is none."""
        lines = [line for output in self.outputs for line in output.read_text().splitlines(keepends=True)]
        return max((int(line) for line in lines if line.endswith("\n")), default=-1)

    def wait_for_commits(self, step: int) -> None:
        try:
            self.store.wait([f"committed/{-(-step // 3) * 3}"], timedelta(seconds=240))
        except RuntimeError as error:
            raise AssertionError("".join(p.with_suffix(".err").read_text()[-3000:] for p in self.outputs)) from error

    def has_ended(self) -> bool:
        return any(process.wait(0.0) is not None for process in self.processes)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            kill(self.processes[rank])

    def close(self) -> None:
        for process in self.processes:
            process.kill_tree()


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30.0) == -signal.SIGKILL


def committed(root: Place, directory: Path) -> list[Path]:
    """Return the checkpoints; those of a store are copied into ``directory``."""
    if isinstance(root, Path):
        return sorted(path for path in root.iterdir() if not path.name.startswith("."))
    return [fetch(StorePath(candidate.path), directory) for candidate in candidates(root)]


def fetch(path: StorePath, directory: Path) -> Path:
    copy = directory / path.name
    copy.mkdir(parents=True)
    for source in (path, content_directory(path)):
        for entry in source.entries():
            if not entry.is_directory:
                (copy / entry.path.name).write_bytes(entry.path.read_bytes())
    return copy


def check_whole(path: Path) -> int:
    """Check that a checkpoint is one, of one step; return that."""
    manifest = Manifest.from_bytes((path / MANIFEST).read_bytes())
    for file in manifest.files:
        content = (path / file.path).read_bytes()
        assert (len(content), xxhash.xxh3_64_hexdigest(content)) == (file.size, file.xxh3)
    step = manifest.step
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {name.removeprefix("state_dict."): entry.size for name, entry in names.items() if hasattr(entry, "size")}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    state = {"state_dict": tensors, "optimizer_0": {"param_groups": [{"lr": -1.0}]}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert len(shapes) == 5
    assert all(torch.equal(tensor, torch.full_like(tensor, step)) for tensor in tensors.values())
    assert state["optimizer_0"]["param_groups"][0]["lr"] == step
    assert (path / "meta.pt").read_bytes() == b"%d" % step
    return step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("where", ["directory", "store"])
def test_a_kill_at_any_moment_leaves_the_last_committed_checkpoint_or_a_newer_one_whole(
    tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    root = place(tmp_path / "checkpoints" if where == "directory" else request.getfixturevalue("bucket"))
    if isinstance(root, Path):
        root.mkdir()
    seed = random.randrange(1 << 30)
    generator, start = random.Random(seed), 0
    victims = {0: [0], 1: [1], 2: [0, 1], 3: []}
    for trial in range(TRIALS):
        ranks = Ranks(tmp_path, root, start)
        try:
            ranks.wait_for_commits(start + 3)
            time.sleep(generator.uniform(0.0, 0.15))  # not to wait for anything: the moment of the kill is random
            writers = [pid for process in ranks.processes for pid in children(process.pid)]
            assert len(writers) == 2
            ranks.kill(victims[trial % 4])
            if trial % 4 == 3:
                os.kill(writers[trial // 4 % 2], signal.SIGKILL)
            time.sleep(generator.uniform(0.0, 0.05))
            ranks.kill(sorted({0, 1} - set(victims[trial % 4])) if not ranks.has_ended() else [])
        finally:
            ranks.close()
        last = ranks.acknowledged()
        steps = [check_whole(path) for path in committed(root, tmp_path / f"fetched_{trial}")]
        assert max(steps) >= last, f"seed {seed}, trial {trial}: step {last} was committed, but there are only {steps}"
        wait_for_end_of(writers)
        collect(root)
        if isinstance(root, Path):
            assert {path.name for path in root.iterdir()} == {path.name for path in committed(root, tmp_path)}
        else:
            found = {candidate.path for candidate in candidates(root)}
            assert {str(entry.path) for entry in root.entries()} == found
            for path in map(StorePath, found):  # the manifest and what it names, and nothing that another save left
                assert {entry.path.name for entry in path.entries()} == {MANIFEST, content_directory(path).name}
        start = max(steps) + 1
    assert not [name for name in os.listdir("/dev/shm") if "lightning_ft" in name]


def wait_for_end_of(pids: Sequence[int]) -> None:
    """Writers notice within seconds that nobody gives them orders any more."""
    for pid in pids:  # children of this process now, unless one ended as a child of its rank
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            assert Process(pid).wait(60.0) is not None, "a writer outlives its rank"
