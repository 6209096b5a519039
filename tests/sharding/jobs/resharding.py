"""Three ranks train, two of them go on from a snapshot, three again; each against ranks that never did anything else."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_ft.sharding import _fsdp_compat
from lightning_ft.sharding.reshard import collect, reshard
from lightning_ft.sharding.shard_tree import put_together_whole
from lightning_ft.sharding.shared_slots import Label, Moment
from lightning_ft.sharding.snapshots import Snapshots, find_whole

CASES = ("tied", "bf16", "two")  # the first one also has a frozen parameter and keeps its parameters after forward


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 7)) for _ in range(2))
        self.norm = nn.LayerNorm(7) if case == "bf16" else nn.BatchNorm1d(7)  # which mixes no types
        self.scale = nn.Parameter(torch.ones(1))  # one row: two of three ranks have none of it
        self.head = nn.Linear(7, 11, bias=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        if case == "tied":
            self.head.weight = self.embedding.weight
            self.blocks[0][0].weight.requires_grad_(False)  # type: ignore[index]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)  # type: ignore[no-any-return]


def build(case: str, mesh: DeviceMesh, state: Any = None) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    net = Net(case)
    if state is not None:
        net.load_state_dict(state["module"])
        net.calls.copy_(state["buffers"]["calls"])
    options: dict[str, Any] = {"mesh": mesh}
    if case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "tied":
        options["reshard_after_forward"] = False
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    optimizers = make_optimizers(case, net)
    if state is not None:
        for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
            for parameter, values in optimizer.state.items():
                optimizer.state[parameter] = {key: share(value, parameter) for key, value in values.items()}
    return net, optimizers


def share(value: Tensor, like: Any) -> Tensor:
    if value.shape != like.shape:
        return value
    local = value.chunk(like.device_mesh.size())
    index = like.device_mesh.get_local_rank()
    mine = local[index] if index < len(local) else value[:0]
    return DTensor.from_local(
        mine.clone(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def make_optimizers(case: str, net: nn.Module) -> list[Optimizer]:
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if case == "bf16":
        return [SGD(parameters, 1e-2, momentum=0.9)]
    if case == "two":
        return [AdamW(parameters[:4], 1e-2, foreach=True, amsgrad=True), Adagrad(parameters[4:], 1e-2)]
    return [AdamW(parameters, 1e-2, foreach=True)]


def train(net: nn.Module, optimizers: list[Optimizer], steps: range, index: int) -> Iterator[float]:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + index)
        loss = net(torch.randint(11, (5,), generator=generator)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def whole(net: nn.Module, optimizers: list[Optimizer]) -> list[Tensor]:
    state = collect(net, optimizers)
    tensors = [*state["module"].values(), *state["buffers"].values()]
    for optimizer in state["optimizers"]:
        tensors += [value for values in optimizer["state"].values() for value in values.values()]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone() for tensor in tensors]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def run(case: str, directory: Path, meshes: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    paths = [[str(directory / f"{case}_{owner}_{number}") for number in range(2)] for owner in range(3)]
    for path in paths[rank]:
        Path(path).touch()
    snapshots, every = Snapshots(paths[rank]), [path for own in paths for path in own]
    net, optimizers = build(case, meshes["three"])
    parameters, hits = list(net.parameters()), list[Tensor]()
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hits.append)
    list(train(net, optimizers, range(4), rank))
    snapshots.begin(
        Label(Moment(0, 4), rank, 3), collect(net, optimizers), deferred=parameters, latest_is_whole=True, at_once=rank == 0
    )
    told: dict[str, Any] = {}
    before = whole(net, optimizers)
    snapshots.fence()
    list(train(net, optimizers, range(50, 53), rank))  # what is lost with the rank
    net(torch.arange(5))  # a pass that nobody ends
    dist.barrier()
    (found,) = find_whole(every)
    states = found.read()
    state = put_together_whole(states, base=rank)
    if rank < 2:
        reshard(net, optimizers, meshes["two"], states, base=rank)
        told["restored"] = same(whole(net, optimizers), before)
        told["same_parameters"] = all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
        hits.clear()
        told["losses"] = list(train(net, optimizers, range(4, 7), rank))
        told["hits"] = len(hits) == 3 * sum(parameter.requires_grad for parameter in parameters)
        fresh, theirs = build(case, meshes["two"], state)
        told["equal"] = told["losses"] == list(train(fresh, theirs, range(4, 7), rank))
        told["same"] = same(whole(net, optimizers), whole(fresh, theirs))
        snapshots.keep(found.moment)
        label = Label(Moment(1, 7), rank, 2)
        snapshots.begin(label, collect(net, optimizers), latest_is_whole=True, at_once=True)
    else:
        net, optimizers = build(case, meshes["one"])  # as a new process would be
        snapshots.keep(found.moment)
    dist.barrier()
    grown, older = find_whole(every)
    told["kept"] = (grown.moment, grown.count, older.moment, older.count) == (Moment(1, 7), 2, Moment(0, 4), 3)
    states = grown.read()
    reshard(net, optimizers, meshes["three"], states, base=min(rank, 1))
    state = put_together_whole(states, base=min(rank, 1))
    fresh, theirs = build(case, meshes["three"], state)
    told["grown"] = same(whole(net, optimizers), whole(fresh, theirs))
    losses = list(train(net, optimizers, range(7, 10), rank))
    told["equal_again"] = losses == list(train(fresh, theirs, range(7, 10), rank))
    told["same_again"] = same(whole(net, optimizers), whole(fresh, theirs))
    return told


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {"three": dist.new_group([0, 1, 2]), "two": dist.new_group([0, 1]), "one": dist.new_group([2])}
    mine = {"three", "two"} if rank < 2 else {"three", "one"}
    meshes = {
        name: DeviceMesh.from_group(groups[name], "cpu", mesh_dim_names=("shard",))  # type: ignore[arg-type]
        for name in sorted(mine)
    }
    told = {case: run(case, directory, meshes) for case in CASES}
    if rank < 2:
        _fsdp_compat.self_test(meshes["two"], meshes["two"])
    (directory / f"told_{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
