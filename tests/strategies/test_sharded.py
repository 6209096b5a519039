"""An unchanged module that is sharded over the ranks of its replica learns what it learns under ``ddp``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_ft import FTStrategy
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.strategies.own_sharding import check_own_shards, explaining_dimensions
from lightning_ft.strategies.sharding import ReplicaSharding, resolve_shard_size
from lightning_ft.testing import run_job, run_without_supervisor

JOB = Path(__file__).parent / "jobs" / "sharded.py"
Variants = dict[str, dict[str, Any]]


def train(directory: Path, strategy: str, devices: int, variants: Variants) -> dict[str, list[dict[str, Any]]]:
    """Run all variants in one job; return what each rank found, by variant."""
    directory.mkdir()
    request = [json.dumps({"strategy": strategy, "devices": devices, "variants": variants})]
    if strategy == "ddp":
        job = run_without_supervisor(JOB, request, num_ranks=devices, directory=directory, timeout=180.0)
        assert job.returncode == 0, job.tail()
    else:
        run_job(JOB, request, num_slots=devices, directory=directory, timeout=180.0).check()
    return {name: [torch.load(directory / f"{strategy}_{name}_{n}.pt") for n in range(devices)] for name in variants}


def assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for part in ("weights", "optimizer", "losses"):
            torch.testing.assert_close(mine[part], other[part], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mine["metrics"], other["metrics"], rtol=1e-5, atol=1e-5)  # a norm is among them


def test_one_replica_of_all_ranks_learns_what_ddp_does_and_its_files_are_the_same(tmp_path: Path) -> None:
    variants: Variants = {
        "average": {"average": True},
        "resumed": {"average": True, "resume": "average.ckpt", "max_epochs": 3},
        "functional": {"module": "Functional", "accumulate_grad_batches": 5},
        "twice": {"module": "Twice", "precision": "bf16-mixed", "gradient_clip_val": 0.1},
    }
    theirs = train(tmp_path / "ddp", "ddp", 2, {**variants, "policy": {"module": "ByHand"}})
    ours = train(
        tmp_path / "ft",
        "ft",
        2,
        {
            "average": {**variants["average"], "shard_size": "all", "units": ["Linear"]},
            "resumed": {**variants["resumed"], "shard_size": 2, "resume": "../ddp/average.ckpt"},
            "replicated": variants["resumed"],
            "functional": {**variants["functional"], "shard_size": 2, "predict": 33},
            "twice": {**variants["twice"], "shard_size": 2},
            "late": {"module": "Late", "shard_size": 2},
            "policy": {"module": "Reduced", "shard_size": 2, "policy": True, "reshard": False},
        },
    )
    assert_alike(ours["policy"], theirs["policy"], tolerance=0.0)  # as a module that shards itself with the same policy
    for name in variants:
        assert_alike(ours[name], theirs[name], tolerance=0.0 if name in ("average", "functional") else 1e-5)
    assert_alike(ours["replicated"], theirs["resumed"], tolerance=0.0)
    for part in ("state_dict", "current_model_state", "optimizer_states"):
        mine, other = (torch.load(tmp_path / who / "average.ckpt", weights_only=True)[part] for who in ("ft", "ddp"))
        torch.testing.assert_close(mine, other, rtol=0.0, atol=0.0)

    whole = theirs["average"][0]["local_bytes"]
    for name in ("average", "late"):
        shares = [rank["local_bytes"] for rank in ours[name]]
        assert sum(shares) == whole
        assert max(shares) < 0.6 * whole
    assert [len(rank["predicted"]) for rank in ours["functional"]] == [5, 4]
    late = ours["late"]
    torch.testing.assert_close(late[0]["weights"], late[1]["weights"], rtol=0.0, atol=0.0)
    assert sum(late[0]["losses"][-12:]) < sum(late[0]["losses"][:12])


def test_two_replicas_of_two_ranks_learn_what_ddp_does(tmp_path: Path) -> None:
    variants: Variants = {
        "plain": {"max_epochs": 5},  # 60 steps
        "accumulated": {"accumulate_grad_batches": 5, "gradient_clip_val": 0.1},
    }
    theirs = train(tmp_path / "ddp", "ddp", 4, variants)
    ours = train(tmp_path / "ft", "ft", 4, {name: {**options, "shard_size": 2} for name, options in variants.items()})
    for name in variants:
        assert_alike(ours[name], theirs[name], tolerance=1e-5)


def test_shards_of_different_sizes_learn_what_ddp_does(tmp_path: Path) -> None:
    theirs = train(tmp_path / "ddp", "ddp", 3, {"plain": {"max_epochs": 4}})  # 64 steps
    ours = train(tmp_path / "ft", "ft", 3, {"plain": {"max_epochs": 4, "shard_size": "all"}})
    assert_alike(ours["plain"], theirs["plain"], tolerance=1e-5)
    assert len({rank["local_bytes"] for rank in ours["plain"]}) > 1


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    finally:
        dist.destroy_process_group()


class ByHand(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1))


class Scaled(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


class Mixed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)


class Parallel(LightningModule):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(self.net[0], mesh=mesh)
        parallelize_module(self.net[1], mesh, ColwiseParallel())


class Optimized(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (ByHand, "manual optimization: `scale` can't be gathered"),
        (Scaled, "`temperature` can't be sharded, being of no dimension"),
        (Mixed, r"parameters of the module have several dtypes \(torch.float32, torch.float64\)"),
        (Sparse, "sparse gradients"),
    ],
)
def test_what_can_not_be_sharded_is_refused_before_it_trains(module: Any, error: str, mesh: DeviceMesh) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`FTStrategy\(shard_size=2\)`.*{error}"):
        ReplicaSharding(2, ShardingOptions()).shard(module(), mesh, lambda tensors: None)


def test_other_shards_than_those_of_the_replica_and_offloading_to_where_all_is_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(MisconfigurationException, match=r"shard_size=2\)`: .* sharded `net.1.weight`, `net.1.bias`"):
        ReplicaSharding(2, ShardingOptions()).shard(Parallel(mesh), mesh, lambda tensors: None)
    with pytest.raises(MisconfigurationException, match=r"`net.0.weight`.*`FTStrategy\(shard_size=...\)`"):
        check_own_shards(Parallel(mesh), None, "FTStrategy(shard_size=1)")
    with (
        pytest.raises(MisconfigurationException, match=r"a dimension that it does not have.*tensor_parallel_size=T\)`"),
        explaining_dimensions("FTStrategy(shard_size=2)"),
    ):
        mesh["tensor_parallel"]
    with pytest.raises(MisconfigurationException, match="parameters are in host memory anyway"):
        ReplicaSharding(2, ShardingOptions(cpu_offload=True)).shard(Optimized(), mesh, lambda tensors: None)
    with pytest.raises(TypeError, match=r"reshard_after_forward=2\).*to share them among meanwhile is not supported"):
        ShardingOptions(reshard_after_forward=2)  # type: ignore[arg-type]


def test_a_sharded_module_and_its_optimizer_load_whole_tensors_and_others_are_refused(mesh: DeviceMesh) -> None:
    sharding, module = ReplicaSharding(2, ShardingOptions()), Optimized()
    sharding.shard(module, mesh, lambda tensors: None)
    sharding.shard(module, mesh, lambda tensors: None)  # as the next Trainer call does
    optimizer = torch.optim.Adam(module.parameters())
    sharding.take_in([optimizer])
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())

    plain = Optimized()
    others = torch.optim.Adam(plain.parameters())
    plain.layer(torch.ones(3, 2)).sum().backward()
    others.step()
    module.layer.load_state_dict(plain.layer.state_dict())
    optimizer.load_state_dict(others.state_dict())
    pairs: list[tuple[Any, Tensor]] = list(zip(module.parameters(), plain.parameters(), strict=True))
    for mine, other in pairs:
        assert torch.equal(mine.full_tensor(), other)
        assert torch.equal(optimizer.state[mine]["exp_avg"].full_tensor(), others.state[other]["exp_avg"])

    with pytest.raises(MisconfigurationException, match="LBFGS, which handles all parameters as one vector"):
        sharding.take_in([torch.optim.LBFGS(module.parameters())])


def test_devices_are_divided_into_replicas() -> None:
    assert [resolve_shard_size(size, 8) for size in (1, 4, "all", "auto")] == [1, 4, 8, 1]
    with pytest.raises(MisconfigurationException, match=r"shard_size=3\)` does not divide the 8 devices. Use 1, 2, 4 or 8."):
        resolve_shard_size(3, 8)
    with pytest.raises(ValueError, match="shard_size=0"):
        FTStrategy(0)
    with pytest.raises(TypeError, match="shard_size='both'"):
        FTStrategy("both")  # type: ignore[arg-type]


class Tied(LightningModule):
    """Its targets are not to be cast; ``training_step`` uses a layer's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = batch.dtype
        self.outputs = self.head(self.net(batch))
        return self.outputs.sum() + self.head.weight.sum()


def test_units_cast_what_they_are_called_with_also_where_all_is_gathered_for_the_step(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = Tied()
    sharded = ReplicaSharding(2, ShardingOptions(mp_policy=policy)).shard(module, mesh, lambda tensors: None)
    for _ in range(2):
        sharded.call("training_step", torch.ones(3, 2), 0).backward()
        assert (module.seen, module.outputs.dtype) == (torch.float32, torch.float32)
        assert isinstance(module.net.weight.grad, DTensor)
        sharded.recover()
