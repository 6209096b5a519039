import os
import resource
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.peers import SoloPeers
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.snapshot import Fence, Snapshot, TornSnapshotError
from lightning_ft.errors import CheckpointNotCommittedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def saver() -> Iterator[AsyncSaver]:
    saver = AsyncSaver(SoloPeers(), max_pending=2)
    yield saver
    saver.close()


def content(state: dict[str, Any], step: int = 1) -> Content:
    return Content(state, lambda seat: {}, Manifest(step=step, epoch=0, run_id="run", world_size=1, shard_size=1, files=()))


def load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_all_kinds_of_tensors_come_back_as_they_were(saver: AsyncSaver, tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    state = {
        "transposed": shared.t(),
        "part": shared[1],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(5, dtype=torch.complex64),
        "bfloat16": torch.randn(513).to(torch.bfloat16),
        "float8": torch.randn(7).to(torch.float8_e4m3fn),
        "int8": torch.arange(100, dtype=torch.int8),
        "parameter": nn.Parameter(torch.randn(1000, 300)),
    }
    saver.save(tmp_path / "a.ckpt", content(state)).wait()
    for name, tensor in load(tmp_path / "a.ckpt", state).items():
        assert (
            torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8))
            if name == "float8"
            else torch.equal(tensor, state[name])
        )


def test_nothing_may_change_before_all_that_is_saved_was_copied_twins_notwithstanding(
    saver: AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Snapshot.finish
    may_copy, returned = threading.Event(), threading.Event()
    monkeypatch.setattr(Snapshot, "finish", lambda *args: may_copy.wait(30) and finish(*args))
    state = {"weight": torch.randn(8)}
    save = saver.save(tmp_path / "a.ckpt", content(state), may_change=lambda name, tensor: False)
    twin = saver.save(tmp_path / "last.ckpt", content(state), twin_of=save)
    waiting = threading.Thread(target=lambda: (saver.wait_for_copy(), returned.set()))
    waiting.start()
    assert not returned.wait(0.3)
    may_copy.set()
    assert returned.wait(30)
    waiting.join()
    twin.wait()
    assert torch.equal(load(tmp_path / "last.ckpt", state)["weight"], state["weight"])


def test_a_save_is_of_the_step_it_was_asked_for_though_training_goes_on(saver: AsyncSaver, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    optimizer = torch.optim.Adam(module.parameters())
    lbfgs = torch.optim.LBFGS(module.parameters(), max_iter=2)
    fence = Fence([optimizer, lbfgs], saver.wait_for_copy)
    parameters = {id(parameter) for parameter in module.parameters()}
    expected = []
    saves = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.randn(8, 300)).square().mean()
        loss.backward()
        return loss

    for step in range(8):
        closure() if step % 2 else None
        [optimizer, lbfgs][step % 4 == 2].step(*() if step % 2 else (closure,))
        state = dict(module.state_dict(keep_vars=True))
        expected.append({name: tensor.detach().clone() for name, tensor in state.items()})
        changing = {name for name, tensor in state.items() if id(tensor) not in parameters}
        assert len(changing) == 3
        saves.append(
            saver.save(tmp_path / f"{step}.ckpt", content(state, step), may_change=lambda name, _, c=changing: name in c)
        )
    saver.wait()
    fence.close()
    for step, save in enumerate(saves):
        save.wait()
        loaded = load(tmp_path / f"{step}.ckpt", expected[step])
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected[step].items()), f"step {step}"


def test_a_change_behind_the_fence_is_noticed() -> None:
    source = torch.zeros(100)
    snapshot = Snapshot([], [("w", torch.zeros(100), source)])
    source.add_(1)
    with pytest.raises(TornSnapshotError, match="`w` was changed in place before the next optimizer step"):
        snapshot.finish()


def test_a_writer_that_dies_or_cannot_write_fails_its_save_alone(saver: AsyncSaver, tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20)}
    saver.save(tmp_path / "0.ckpt", content(state), replaces=()).wait()
    pid = saver.writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = saver.save(tmp_path / "1.ckpt", content(state, 1), replaces=[tmp_path / "0.ckpt"])
    with pytest.raises(CheckpointNotCommittedError, match=r"rank 0 failed \(ConnectionError: the writer process"):
        killed.wait()
    saver.save(tmp_path / "2.ckpt", content(state, 2)).wait()
    assert saver.writer.pid not in (None, pid)
    resource.prlimit(saver.writer.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    full = saver.save(tmp_path / "3.ckpt", content(state, 3), replaces=[tmp_path / "2.ckpt"])
    with pytest.raises(CheckpointNotCommittedError, match=r"rank 0 failed \(file too large: .*distcp\)"):
        full.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.ckpt", "2.ckpt"]
    assert len(os.listdir(f"/proc/{saver.writer.pid}/fd")) < 10


def test_a_writer_that_stands_still_is_given_up(tmp_path: Path) -> None:
    saver = AsyncSaver(SoloPeers(), timeout=timedelta(seconds=1))
    try:
        saver.save(tmp_path / "0.ckpt", content({"w": torch.randn(100)})).wait()
        pid = saver.writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stopped = saver.save(tmp_path / "1.ckpt", content({"w": torch.randn(100)}))
        with pytest.raises(
            CheckpointNotCommittedError, match=r"rank 0 failed \(ConnectionError: .* is gone: it did not answer within 1 s\)"
        ):
            stopped.wait()
        assert not Path(f"/proc/{pid}").exists()
    finally:
        saver.close()
