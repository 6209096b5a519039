"""What a checkpoint costs: against ``torch.save``, torch's synchronous and asynchronous saves, and copying the memory.

Ranks train a stack of linear layers and save it in turn by each method, so that all meet the same machine. The state is
about 150 MB a rank, replicated (DistributedDataParallel) or sharded (FSDP2).

How much slower steps are is measured in windows of steps with nothing under way and windows of steps in all of which a save
is: the next one begins when the one before is there. CPU time is that of the threads and processes that save.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from benchmarks.holdings import Holdings
from benchmarks.save_cpu import SavingClock
from lightning_ft.checkpoint._torch_compat import default_store
from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.peers import StorePeers
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.snapshot import Fence
from lightning_ft.checkpoint.writer_process import sync_directory

ASYNCHRONOUS = ("ours", "ours in a store", "async_save thread", "async_save process")
METHODS = ("ours", "ours in a store", "torch.save", "dcp.save", "dcp.save+fsync", "async_save thread", "async_save process")
MODES = {1: "replicated", 2: "sharded"}
Start = Callable[[Path], Callable[[], bool]]


class Rank:
    """One rank of the benchmark."""

    def __init__(self, mode: str, layers: int, width: int, root: Path) -> None:
        self.rank, self.world_size, self.root, self.mode = dist.get_rank(), dist.get_world_size(), root, mode
        torch.manual_seed(0)
        stack = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        if mode == "sharded":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.world_size,))
            for layer in stack:
                fully_shard(layer, mesh=mesh)
            self.module: nn.Module = fully_shard(stack, mesh=mesh)
        else:
            self.module = nn.parallel.DistributedDataParallel(stack)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, foreach=True)
        self.inputs = torch.randn(48, width)
        for _ in range(3):
            self.step()
        self.group, self.talk = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")  # one for torch's threads
        dist.barrier(self.group)
        dist.barrier(self.talk)
        self.clock = SavingClock()  # groups poll all the time, also while nothing is saved
        self.saver = AsyncSaver(StorePeers(default_store(), self.rank, self.world_size, "benchmark"), timeout=timedelta(300))
        self.fence = Fence([self.optimizer], self.saver.wait_for_copy)
        self.count = 0
        self.still = {parameter.untyped_storage().data_ptr() for parameter in map(local, self.module.parameters())}
        if self.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
        dist.barrier()

    def step(self) -> float:
        started = time.perf_counter()
        self.module(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(cpu_offload=False)
        model = get_model_state_dict(self.module, options=options)
        return {"state_dict": model, "optimizer_0": get_optimizer_state_dict(self.module, self.optimizer, options=options)}

    # Methods: each begins to save and returns what says whether the checkpoint is on the disk.

    def ours(self, path: Path | str) -> Callable[[], bool]:
        manifest = Manifest(step=self.count, epoch=0, run_id="benchmark", world_size=1, shard_size=1, files=())
        content = Content(self.state(), lambda seat: {}, manifest)
        save = self.saver.save(path, content, may_change=lambda name, tensor: not name.startswith(("state", "optim")))
        return lambda: save.done

    def torch_save(self, path: Path) -> Callable[[], bool]:
        if self.mode == "sharded":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state: Any = {
                "state_dict": get_model_state_dict(self.module, options=options),
                "optimizer_0": get_optimizer_state_dict(self.module, self.optimizer, options=options),
            }
        else:
            state = {"state_dict": self.module.state_dict(), "optimizer_0": self.optimizer.state_dict()}
        if self.rank == 0:
            with open(path, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier(self.group)
        return lambda: True

    def dcp_save(self, path: Path, *, syncs: bool) -> Callable[[], bool]:
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(path, sync_files=syncs), process_group=self.group)
        if syncs and self.rank == 0:
            sync_directory(str(path))
            sync_directory(str(path.parent))
        return lambda: True

    def async_save(self, path: Path, kind: str) -> Callable[[], bool]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        which = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD
        future = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group, async_checkpointer_type=which)
        return getattr(future, "upload_completion", future).done  # type: ignore[no-any-return]

    def methods(self, store: str | None) -> dict[str, Start]:
        in_store = {} if store is None else {"ours in a store": lambda path: self.ours(f"{store}/{self.mode}/{path.name}")}
        return in_store | {
            "ours": self.ours,
            "torch.save": self.torch_save,
            "dcp.save": lambda path: self.dcp_save(path, syncs=False),
            "dcp.save+fsync": lambda path: self.dcp_save(path, syncs=True),
            "async_save thread": lambda path: self.async_save(path, "thread"),
            "async_save process": lambda path: self.async_save(path, "process"),
        }

    # Measuring.

    def measure(self, start: Start, num_steps: int) -> dict[str, float]:
        """Save once; return what it took, in milliseconds."""
        self.count += 1
        path = self.root / f"{self.count}"
        dist.barrier(self.group)
        before = self.clock.read()
        cpu, begun = time.thread_time(), time.perf_counter()
        is_done = start(path)
        blocked, cpu = time.perf_counter() - begun, time.thread_time() - cpu
        durable: float | None = blocked if is_done() else None
        fenced = self.saver.stall_seconds
        for _ in range(num_steps):
            self.step()
            if durable is None and is_done():
                durable = time.perf_counter() - begun
        while durable is None:
            time.sleep(0.002)
            durable = time.perf_counter() - begun if is_done() else None
        result = {
            "block": blocked + self.saver.stall_seconds - fenced,
            "cpu": cpu + self.clock.since(before),
            "durable": durable,
        }
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        return {name: 1e3 * value for name, value in result.items()}

    def slowdown(self, start: Start, num_steps: int) -> dict[str, list[float]]:
        """Return how long steps take while nothing is saved, and while a save is under way, in milliseconds."""
        self.count += 1
        path = self.root / f"{self.count}"
        dist.barrier(self.talk)
        idle = [self.step() for _ in range(num_steps)]
        saving = []
        is_done = start(path)
        for _ in range(num_steps):
            if self.all_agree(is_done()):
                is_done = start(path)
            saving.append(self.step())
        while not is_done():
            time.sleep(0.002)
        dist.barrier(self.talk)
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        return {"idle": [1e3 * one for one in idle], "saving": [1e3 * one for one in saving]}

    def growth(self, num_saves: int) -> dict[str, list[float]]:
        """Return what steps hold more after them than before: as many of them without a save, then with one each."""
        grown: dict[str, list[float]] = defaultdict(list)
        for saves in (False, True):
            for _ in range(3):
                self.ours(self.root / "again")
            self.saver.wait()
            before = Holdings.now(self.root)
            for _ in range(num_saves):
                if saves:
                    self.ours(self.root / "again")
                self.step()
            self.saver.wait()
            for name, value in Holdings.now(self.root).growth(before).items():
                grown[name].append(value)
            dist.barrier(self.talk)
        self.saver.close()
        return grown

    def all_agree(self, value: bool) -> bool:
        flag = torch.tensor(value, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MIN, self.talk)
        return bool(flag)

    def memcpy(self) -> float:
        """Return how long a blocking copy of this rank's share takes, in milliseconds."""
        sources = [local(tensor) for tensor in tensors_of(self.state())]
        share = sources if self.mode == "sharded" else sources[self.rank :: self.world_size]
        if not hasattr(self, "room"):
            self.room = [torch.empty_like(tensor) for tensor in share]
            torch._foreach_copy_(self.room, share)
        begun = time.perf_counter()
        torch._foreach_copy_(self.room, share)
        return 1e3 * (time.perf_counter() - begun)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def run_rank(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(options.mode, options.layers, options.width, Path(options.directory) / options.mode)
    methods = rank.methods(options.store)
    names = tuple(name for name in METHODS if name in methods)
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    floors = []
    for number in range(options.rounds + 1 if options.rounds else 0):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            if name == "async_save process" and options.skip_process:
                continue
            floors.append(rank.memcpy())
            result = rank.measure(methods[name], options.steps)
            steps = rank.slowdown(methods[name], options.steps) if name in ASYNCHRONOUS else {}
            if number:  # the first of each makes plans, memory and processes
                for key, value in result.items():
                    measured[name][key].append(value)
                for key, values in steps.items():
                    measured[name][key] += values
    report = {"values": measured, "floor": floors, "growth": rank.growth(options.saves)}
    Path(options.directory, f"{options.mode}_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # executors of torch's asynchronous saves would be waited for


def run_mode(options: argparse.Namespace, mode: str, directory: str) -> dict[str, Any]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--mode", mode, "--directory", directory]
    command += [f"--{name}={getattr(options, name)}" for name in ("rounds", "steps", "layers", "width", "saves")]
    command += ["--skip-process"] if options.skip_process else []
    command += [f"--store={options.store}"] if options.store else []
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        if codes := [code for process in ranks if (code := process.wait(1800))]:
            sys.exit(f"ranks ended with {codes}")
    finally:
        for process in ranks:
            process.kill()
    result: dict[str, Any] = json.loads(Path(directory, f"{mode}_0.json").read_text())
    return result


def summarize(mode: str, result: dict[str, Any]) -> dict[str, float]:
    """Print the table of one mode; return its keys."""
    without, grown = ({name: pair[index] for name, pair in result["growth"].items()} for index in (0, 1))
    print(f"\n{mode}: more after steps without saves: {_told(without)}; with one each: {_told(grown)}")
    keys = {f"rss_growth_mb_{mode}": grown["mb"] - without["mb"]}
    if not result["values"]:
        return keys
    floor = statistics.median(result["floor"])
    rows: dict[str, dict[str, list[float]]] = result["values"]
    medians = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}
    ours, torchs = medians["ours"], medians["async_save thread"]
    print(f"copying the memory takes {floor:.1f} ms, a step {ours['idle']:.0f} ms; medians in ms")
    print(f"{'method':20} {'blocked':>9} {'max':>9} {'CPU':>9} {'durable':>9} {'step / idle':>12}")
    for name, row in medians.items():
        longest = max(rows[name]["block"])
        slowdown = f"{row['saving'] / row['idle']:12.2f}" if "saving" in row else ""
        print(f"{name:20} {row['block']:9.1f} {longest:9.1f} {row['cpu']:9.1f} {row['durable']:9.0f} {slowdown}")
    if "ours in a store" in medians:
        keys[f"blocking_of_store_over_memcpy_{mode}"] = medians["ours in a store"]["block"] / floor
    return keys | {
        f"blocking_over_memcpy_{mode}": ours["block"] / floor,
        f"blocking_over_sync_fsync_{mode}": ours["block"] / medians["dcp.save+fsync"]["block"],
        f"step_slowdown_while_writing_{mode}": ours["saving"] / ours["idle"],
        f"cpu_ms_per_save_{mode}": ours["cpu"],
        f"cpu_over_async_save_thread_{mode}": ours["cpu"] / torchs["cpu"],
        f"durable_ms_{mode}": ours["durable"],
    }


def _told(growth: dict[str, float]) -> str:
    return ", ".join(f"{value:.0f} {name}" for name, value in growth.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="saves by each method; 0: only --saves of ours")
    parser.add_argument("--steps", type=int, default=8, help="steps in a row without and with saves under way")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--saves", type=int, default=100, help="after which memory, descriptors and the like are counted")
    parser.add_argument("--shard-size", type=int, choices=(1, 2), help="1: replicated, 2: sharded; both by default")
    parser.add_argument("--skip-process", action="store_true")
    parser.add_argument("--store", help="also save there: an address such as s3://bucket/run")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help="where to save; a temporary directory by default")
    options = parser.parse_args()
    if options.mode:
        run_rank(options)
        return
    keys: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for mode in [mode for size, mode in MODES.items() if options.shard_size in (None, size)]:
            keys |= summarize(mode, run_mode(options, mode, directory))
    print(json.dumps({name: round(value, 3) for name, value in keys.items()}))


if __name__ == "__main__":
    main()
