"""What a checkpoint costs: against ``torch.save``, torch's synchronous and asynchronous saves, and copying the memory.

Ranks train a stack of linear layers and save it in turn by each method, so that all meet the same machine. The state is
about 150 MB a rank, replicated (DistributedDataParallel) or sharded (FSDP2).
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

from lightning_ft.checkpoint._torch_compat import default_store
from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.peers import StorePeers
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.snapshot import Fence
from lightning_ft.checkpoint.writer_process import sync_directory
from lightning_ft.testing.processes import descendants

METHODS = ("ours", "ours in a store", "torch.save", "dcp.save", "dcp.save+fsync", "async_save thread", "async_save process")
MODES = {1: "replicated", 2: "sharded"}
Start = Callable[[Path], Callable[[], bool]]


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of this process and others."""
    total = time.process_time()
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def resident_mb(pids: list[int]) -> float:
    """Memory of processes, with what they share counted once for each."""
    total = 0
    for pid in pids:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        total += int(lines["VmRSS"].split()[0])
    return total / 1024


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
        self.group = dist.new_group(backend="gloo")
        self.saver = AsyncSaver(StorePeers(default_store(), self.rank, self.world_size, "benchmark"), timeout=timedelta(300))
        self.fence = Fence([self.optimizer], self.saver.wait_for_copy)
        self.count = 0
        self.still = {parameter.untyped_storage().data_ptr() for parameter in map(local, self.module.parameters())}
        for _ in range(3):
            self.step()
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
        dist.barrier()
        pids = descendants(os.getpid())
        cpu = cpu_seconds(pids)
        idle = [self.step() for _ in range(num_steps)]
        idle_cpu = cpu_seconds(pids) - cpu
        dist.barrier()
        cpu, begun = cpu_seconds(pids), time.perf_counter()
        is_done = start(path)
        blocked = time.perf_counter() - begun
        durable: float | None = time.perf_counter() - begun if is_done() else None
        fenced = self.saver.stall_seconds
        writing = []
        for _ in range(num_steps):
            was_writing = durable is None
            taken = self.step()
            if durable is None and is_done():
                durable = time.perf_counter() - begun
            if was_writing:
                writing.append(taken)
        while durable is None:
            time.sleep(0.002)
            durable = time.perf_counter() - begun if is_done() else None
        used = cpu_seconds(sorted({*pids, *descendants(os.getpid())})) - cpu
        result = {
            "block": blocked + self.saver.stall_seconds - fenced,
            "cpu": used - idle_cpu,
            "durable": durable,
            "idle_step": statistics.median(idle),
            "step": statistics.median(writing) if writing else float("nan"),
        }
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        return {name: 1e3 * value for name, value in result.items()}

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
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    floors = []
    for number in range(options.rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            if name == "async_save process" and options.skip_process:
                continue
            floors.append(rank.memcpy())
            result = rank.measure(methods[name], options.steps)
            if number:  # the first of each makes plans, memory and processes
                measured[name].append(result)
    writer = rank.saver.writer.pid
    assert writer is not None
    pids = [os.getpid(), writer]
    before = resident_mb(pids)
    for _ in range(options.saves):
        rank.ours(rank.root / "again")
        rank.step()
    rank.saver.wait()
    grown = resident_mb(pids) - before
    rank.saver.close()
    values = {name: {key: [one[key] for one in all_of] for key in all_of[0]} for name, all_of in measured.items()}
    Path(options.directory, f"{options.mode}_{dist.get_rank()}.json").write_text(
        json.dumps({"values": values, "floor": floors, "rss_growth_mb": grown})
    )
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


def median_of_known(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.median(known) if known else float("nan")


def summarize(mode: str, result: dict[str, Any]) -> dict[str, float]:
    """Print the table of one mode; return its keys."""
    floor = statistics.median(result["floor"])
    medians = {
        name: {
            key: statistics.median([one for one in column if one == one] or [float("nan")]) for key, column in values.items()
        }
        for name, values in result["values"].items()
    }
    idle = statistics.median([one for values in result["values"].values() for one in values["idle_step"]])
    print(f"\n{mode}: copying the memory takes {floor:.1f} ms, a step {idle:.0f} ms; medians in ms")
    print(f"{'method':20} {'blocked':>9} {'max':>9} {'CPU':>9} {'durable':>9} {'step / idle':>12}")
    for name, row in medians.items():
        longest = max(result["values"][name]["block"])
        print(
            f"{name:20} {row['block']:9.1f} {longest:9.1f} {row['cpu']:9.1f} {row['durable']:9.0f}"
            f" {row['step'] / row['idle_step']:12.2f}"
        )
    ours = medians["ours"]
    of_store = medians.get("ours in a store")
    in_store = {} if of_store is None else {f"blocking_of_store_over_memcpy_{mode}": of_store["block"] / floor}
    return in_store | {
        f"blocking_over_memcpy_{mode}": ours["block"] / floor,
        f"blocking_over_sync_fsync_{mode}": ours["block"] / medians["dcp.save+fsync"]["block"],
        f"step_slowdown_while_writing_{mode}": ours["step"] / ours["idle_step"],
        f"cpu_ms_per_save_{mode}": ours["cpu"],
        f"cpu_over_async_save_thread_{mode}": ours["cpu"] / medians["async_save thread"]["cpu"],
        f"durable_ms_{mode}": ours["durable"],
        f"rss_growth_mb_{mode}": result["rss_growth_mb"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="steps timed without and with a save under way")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--saves", type=int, default=100)
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
