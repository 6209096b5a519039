"""One rank that takes snapshot after snapshot until it is killed, and says which ones were whole."""

import sys

import torch

from lightning_ft.sharding.shared_slots import Label, Moment
from lightning_ft.sharding.snapshots import Snapshots


def main(first: int, *paths: str) -> None:
    snapshots = Snapshots(paths)
    snapshots.keep(Moment(0, first - 1))
    step = first
    while True:
        # Sizes change as they do when ranks come and go.
        tensors = [torch.full((10_000 + 40_000 * (step % 7),), step), torch.full((3,), float(step)), torch.empty(0)]
        snapshots.begin(
            Label(Moment(0, step), 0, 1), {"step": step, "tensors": tensors}, deferred=tensors[:1], latest_is_whole=True
        )
        snapshots.fence()
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        step += 1


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
