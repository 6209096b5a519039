"""A rank that does nothing but save: all tensors hold the step, so that mixed steps can't hide.

Arguments: rank, number of ranks, port of the store, directory, first step.
"""

import os
import sys
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import TCPStore

from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.peers import StorePeers
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.checkpoint.store_path import Place, place

SHAPES = ((257, 129), (300, 300), (64,), (1000, 77), (3, 5, 7))


def main() -> None:
    rank, world_size, port, start = (int(sys.argv[index]) for index in (1, 2, 3, 5))
    root = place(sys.argv[4])
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    saver = AsyncSaver(StorePeers(store, rank, world_size, f"run{start}"), timeout=timedelta(seconds=60))
    tensors = {f"w{index}": torch.empty(shape) for index, shape in enumerate(SHAPES)}
    state = {"state_dict": tensors, "optimizer_0": {"param_groups": [{"lr": 0.0}]}}
    previous: list[Place] = []
    for step in range(start, sys.maxsize):
        saver.wait_for_copy()
        for tensor in tensors.values():
            tensor.fill_(step)
        state["optimizer_0"]["param_groups"][0]["lr"] = float(step)
        target = root / f"step={step:08d}.ckpt"
        content = Content(state, partial(files, step), manifest(step, world_size))
        save = saver.save(target, content, replaces=previous, may_change=lambda name, tensor: name.endswith("w2"))
        if step % 3 == 0:  # the others overlap with what comes next
            save.wait()
            os.write(1, b"%d\n" % step)
            store.set(f"committed/{step}", "")
        previous = [target]


def files(step: int, seat: Seat) -> dict[str, bytes]:
    return {"meta.pt": b"%d" % step} if seat.rank == 0 else {}


def manifest(step: int, world_size: int) -> Manifest:
    return Manifest(step=step, epoch=0, run_id="run", world_size=world_size, shard_size=1, files=())


if __name__ == "__main__":
    main()
