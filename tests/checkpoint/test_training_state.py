import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft.checkpoint import (
    async_save_training_state,
    load_training_metadata,
    load_training_state,
    process_saver,
    save_sharded,
    save_training_state,
)
from lightning_ft.errors import CheckpointNotCommittedError, DamagedCheckpointError, MalformedStateError
from lightning_ft.testing import run_without_supervisor
from lightning_ft.testing.processes import children

SCRIPT = Path(__file__).parent / "jobs" / "plain_torch.py"


@pytest.fixture(autouse=True, scope="module")
def _no_writer_is_left() -> Iterator[None]:
    yield
    process_saver.close()
    assert "writer_process" not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in children(os.getpid()))


def run(phase: str, num_ranks: int, directory: Path) -> list[dict[str, Any]]:
    run_without_supervisor(SCRIPT, [phase], num_ranks=num_ranks, directory=directory).check()
    return [json.loads((directory / f"{phase}_{rank}.json").read_text()) for rank in range(num_ranks)]


def test_a_training_without_a_trainer_goes_on_as_if_it_had_not_stopped_also_on_other_ranks(
    tmp_path: Path,
) -> None:
    trained = run("train", 2, tmp_path)
    resharded = run("reshard", 3, tmp_path)
    for kind in ("replicated", "sharded"):
        # Nobody waited for `last`, and nothing is left of what failed on one rank.
        names = {"step=2", "last", "sharded", "frozen0", "frozen1", "meanwhile"}
        assert {path.name for path in (tmp_path / kind).iterdir()} == names
        assert load_training_metadata(tmp_path / kind / "last").step == 5
        for rank in range(2):
            before, after = trained[rank][kind], trained[rank][kind]["resumed"]
            assert "rank 1 failed (UnsupportedStateError: " in before["unsupported"]
            assert "what must be the same on all ranks, such as the step, differs" in before["differing"]
            if kind == "sharded" and rank == 1:  # buffers of its own, which the first rank's took the place of
                after["final"] |= {name: value for name, value in before["final"].items() if "running" in name}
            assert (after["final"], after["random"]) == (before["final"], before["random"])
            assert before["done"]
            assert after["status"] == "native"
            assert after["loader_state"] == {"seed": 0, "epoch": 0, "rank": rank, "world_size": 2, "batch_idx": 20 + rank}
            assert after["extra"] == {"a": [1, 2]}
            assert after["unneeded"].startswith("ValueError: `rank_local_transform` is not needed")
        for rank in range(3):
            result = resharded[rank][kind]
            changed, missing, broken, *others = result["refused"]
            assert changed.startswith("WorldSizeChangedError: ")
            assert missing.startswith("ValueError: `allow_world_size_change=True` without `rank_local_transform`")
            kinds = (
                "ValueError: `rank_local_transform` returned ['loader_state']",
                "StateNotLoadedError: Nothing was loaded",
            )
            assert broken.startswith(kinds[rank != 1])
            assert others[0].startswith("WorldSizeChangedError: ")
            assert "the groups of optimizer 0 have the parameters (3.weight, 3.bias)" in others[1]
            assert result["untouched"]
            assert result["looked"] == ["transform_required", 2, None]
            assert result["position"] == [2, rank, 3, 20, 21]
            assert result["values"] == trained[0][kind]["at_two"]
            assert result["again"] == [True] * 4
    loading = resharded[0]["late"].pop()
    assert loading == "CollectiveTimeoutError: `load_sharded` waited 0.3 s for ranks 1, 2 and gave up."
    for result in resharded:
        assert "was not committed: ranks 1, 2 did not write within 0.3 s" in result["late"][0]


def test_what_was_begun_is_there_after_the_process_ended_with_an_error(tmp_path: Path) -> None:
    result = run_without_supervisor(SCRIPT.with_name("raises.py"), [], num_ranks=1, directory=tmp_path)
    assert result.returncode != 0
    assert "KeyError: 'mine'" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert load_training_metadata(tmp_path / "2").step == 2


@pytest.fixture
def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(40, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    return module, optimizer


Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", "training.state", "rank-00000.state", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 3), os.unlink])
def test_of_a_damaged_checkpoint_nothing_is_loaded(
    name: str, damage: Damage, training: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    module, optimizer = training
    save_training_state(module, optimizer, tmp_path / "a", step=1)
    damage(tmp_path / "a" / name)
    with torch.no_grad():
        module.weight.add_(1)
    weights, momentum, random = (
        module.weight.clone(),
        optimizer.state[module.weight]["exp_avg"].clone(),
        torch.get_rng_state(),
    )
    with pytest.raises(DamagedCheckpointError, match=name):
        load_training_state(module, optimizer, tmp_path / "a")
    assert torch.equal(module.weight, weights)
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], momentum)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_does_not_fit_is_told_before_anything_changes(
    training: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = training
    save_training_state(module, optimizer, tmp_path / "a", step=1)
    weights = module.weight.clone()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(MalformedStateError, match=r"states of the optimizers \['AdamW'\], to be loaded are \['SGD'\]"):
        load_training_state(module, torch.optim.SGD(module.parameters()), tmp_path / "a")
    with pytest.raises(ValueError, match="has no state of a scaler"):
        load_training_state(module, optimizer, tmp_path / "a", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="AdamW has a parameter that is none of the module's"):
        save_sharded(nn.Linear(1, 1), optimizer, tmp_path / "b")
    with pytest.raises(TypeError, match=r"step=True"):
        save_training_state(module, optimizer, tmp_path / "b", step=True)
    save_sharded(module, optimizer, tmp_path / "b")
    with pytest.raises(DamagedCheckpointError, match=r"it has no training.state: `save_training_state` did not save it"):
        load_training_state(module, optimizer, tmp_path / "b")
    assert torch.equal(module.weight, weights + 1)
    load_training_state(module, optimizer, tmp_path / "a")
    assert torch.equal(module.weight, weights)


class Tied(nn.Module):
    """Has a parameter under two names, a frozen one, a buffer, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.own: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        return self.b(self.a(inputs))

    def get_extra_state(self) -> Any:
        return {"own": 1}

    def set_extra_state(self, state: Any) -> None:
        self.own = state


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.LBFGS,
        torch.optim.Adafactor,
        torch.optim.NAdam,
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False, amsgrad=True),
    ],
)
def test_every_optimizer_comes_back_and_saving_changes_none(kind: Any, num_steps: int, tmp_path: Path) -> None:
    def make() -> tuple[Tied, torch.optim.Optimizer]:
        module = Tied()
        return module, kind(module.parameters())

    def train(module: Tied, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        def closure() -> float:
            optimizer.zero_grad()
            loss = module(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss.item()

        for _ in range(num_steps):
            optimizer.step(closure)
        return plain([module.state_dict(), optimizer.state_dict()])

    module, optimizer = make()
    before = train(module, optimizer, num_steps)
    save_training_state(module, optimizer, tmp_path / "a", step=num_steps)
    assert plain([module.state_dict(), optimizer.state_dict()]) == before
    other, its_optimizer = make()
    load_training_state(other, its_optimizer, tmp_path / "a")
    assert plain([other.state_dict(), its_optimizer.state_dict()]) == before
    assert other.own == {"own": 1}
    assert train(other, its_optimizer, 1) == train(module, optimizer, 1)


def test_a_save_that_failed_leaves_the_one_before_and_is_told_once(
    training: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = training
    save_training_state(module, optimizer, tmp_path / "a", step=1)
    expected = f"UnsupportedStateError.*Still intact: {tmp_path}/a"
    with pytest.raises(CheckpointNotCommittedError, match=expected):
        save_training_state(module, optimizer, tmp_path / "a", step=2, extra={"x": object()})
    assert not caplog.records  # what is raised anyway is not logged
    failed = async_save_training_state(module, optimizer, tmp_path / "a", step=3, extra={"x": object()})
    with pytest.raises(CheckpointNotCommittedError, match=expected):
        failed.wait()
    assert [record.getMessage() for record in caplog.records] == [str(failed.error)]
    assert load_training_metadata(tmp_path / "a").step == 1
