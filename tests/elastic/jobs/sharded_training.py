"""A small FSDP2 module trained by replicas of several ranks, with the engine alone, and the same in one process."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.exchange import Exchange
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.process_group import install_once
from lightning_ft.sharding._fsdp_compat import abandon_pass


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(net: nn.Module, step: int, slot: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + slot)
    inputs, targets = torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)
    loss: Tensor = (net(inputs) - targets).square().mean()
    return loss


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


class ShardedTraining:
    def __init__(self, engine: LocalEngine, deaths: dict[int, list[int]]) -> None:
        self.engine = engine
        self.deaths = deaths if engine.incarnation == 0 else {}  # step -> slots
        install_once(engine, Collectives(engine))
        mesh = DeviceMesh.from_group(engine.shard_group, "cpu", mesh_dim_names=("shard",))
        self.net = make_net()
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.01)
        self.members: list[list[int]] = []
        self.norms: list[float] = []
        self.join = False

    def run(self, num_steps: int, num_replicas: int) -> dict[str, Any]:
        if self.engine.alone:
            loss_of(self.net, 0, 0).backward()
            self.optimizer.step()
            self.take(self.engine.join())
            self.engine.enter()
        while len(self.norms) < num_steps or (num_replicas > self.engine.replica.count and len(self.norms) < 3000):
            self.step()
            self.engine.report_progress(len(self.norms))
            if self.join:
                self.engine.admit_joiners(lambda slots: self.state())
        return {
            "replica": [self.engine.replica.index, self.engine.replica.shard, *self.engine.replica.slots],
            "rank": dist.get_rank(self.engine.shard_group),
            "members": self.members,
            "norms": self.norms,
            "weights": [parameter.full_tensor().tolist() for parameter in self.net.parameters()],
        }

    def step(self) -> None:
        norm, members, join = self.engine.redo(self.backward, self.reset)
        self.optimizer.step()
        self.members.append(members)
        self.norms.append(norm)
        self.join = join

    def backward(self) -> tuple[float, list[int], bool]:
        self.optimizer.zero_grad()
        loss = loss_of(self.net, len(self.norms), self.engine.slot)
        Collectives(self.engine).barrier("operations may come before")
        dies = self.engine.slot in self.deaths.get(len(self.norms), [])
        (Dies.apply(loss) if dies else loss).backward()
        averages, members, join = self.engine.run("gradients", self.reduce, voted=True)
        for parameter, average in zip(self.net.parameters(), averages, strict=True):
            parameter.grad.to_local().copy_(average)
        return nn.utils.clip_grad_norm_(self.net.parameters(), 1.0).full_tensor().item(), members, join

    def reduce(self, exchange: Exchange) -> Any:
        averages = [parameter.grad.to_local().clone() for parameter in self.net.parameters()]
        for average in averages if exchange.replicate is not None else ():
            exchange.replicate.allreduce([average]).wait()
            average /= exchange.num_replicas
        wanted = torch.tensor([float(self.engine.join_wanted)])
        exchange.all_reduce(wanted)
        return averages, sorted(self.engine.members), bool(wanted)

    def reset(self) -> None:
        abandon_pass(self.net)

    def state(self) -> dict[str, Any]:
        local = [parameter.to_local().detach() for parameter in self.net.parameters()]
        moments = [
            {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
            for state in (self.optimizer.state[parameter] for parameter in self.net.parameters())
        ]
        return {"local": local, "moments": moments, "members": self.members, "norms": self.norms}

    def take(self, state: dict[str, Any]) -> None:
        self.members, self.norms = list(state["members"]), list(state["norms"])
        for parameter, local, moments in zip(self.net.parameters(), state["local"], state["moments"], strict=True):
            parameter.to_local().detach().copy_(local)
            for name, value in moments.items():
                mine = self.optimizer.state[parameter][name]
                (mine.to_local() if hasattr(mine, "to_local") else mine).copy_(value)


def train(engine: LocalEngine, num_steps: int, num_replicas: int, deaths: dict[str, list[int]]) -> dict[str, Any]:
    return ShardedTraining(engine, {int(step): slots for step, slots in deaths.items()}).run(num_steps, num_replicas)


def train_in_one_process(members: list[list[int]]) -> tuple[list[float], list[Tensor]]:
    """Train on the batches that are in each step; return the norms of the gradients, and the weights."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    norms = []
    for step, slots in enumerate(members):
        optimizer.zero_grad()
        torch.stack([loss_of(net, step, slot) for slot in slots]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        optimizer.step()
    return norms, list(net.parameters())
