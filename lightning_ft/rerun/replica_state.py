"""What replicas must hold alike, as checksums, and which of them are outvoted."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


NUMBERS = "numbers of the optimizers"
"""Names what is no tensor: learning rates and the like."""


def named_state(module: Module, optimizers: Iterable[Optimizer]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return this rank's share of the parameters and of the state of their optimizers, by name: tensors, and numbers.

    Buffers are left out: those of BatchNorm differ by rank.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: dict[str, Any] = {name: _local(parameter) for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        if type(optimizer).__name__ != "ZeroRedundancyOptimizer":  # each rank has a part of its own
            state.update(_of_optimizer(optimizer, f"optimizer {number}", names))
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _of_optimizer(optimizer: Optimizer, prefix: str, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, (int, float, Tensor)):
                yield f"{prefix}, group {index}, {key}", value
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {place} of group {index}")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (int, float, Tensor)):
                    yield f"{prefix}, {key} of {name}", _local(value)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> dict[str, int]:
    """Return a number for each tensor, and one for all numbers; one flipped bit changes it.

    On a device numbers are added up as integers, and all sums are copied at once: nothing else leaves it.
    """
    result: dict[str, int] = {}
    on_device: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.device.type == "cpu":
            flat = value.detach().contiguous().reshape(-1)
            result[name] = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
        else:
            on_device[name] = sum_of_bits(value)
    if on_device:
        sums = torch.stack([value.to(next(iter(on_device.values())).device) for value in on_device.values()]).tolist()
        result.update(zip(on_device, sums, strict=True))
    ordered = {name: result[name] for name in tensors}
    return {**ordered, NUMBERS: xxhash.xxh3_64_intdigest(repr(numbers).encode())}


def sum_of_bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, read as integers."""
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value.detach().view(_BITS[value.element_size()]).sum(dtype=torch.int64)


def combined(parts: Mapping[str, int]) -> int:
    """Return one number for all entries."""
    total = xxhash.xxh3_64()
    for name, part in parts.items():
        total.update(name.encode())
        total.update(struct.pack("=Q", part & 0xFFFFFFFFFFFFFFFF))
    return total.intdigest()


@dataclass(frozen=True)
class Vote:
    """Who holds the same as most others that must hold the same.

    Args:
        right: For each shard, the slots that are more than half of those that hold it, if there is such a majority.
        wrong: The slots that are outvoted.
        undecided: The slots that differ where there is no majority.

    """

    right: dict[int, tuple[int, ...]]
    wrong: tuple[int, ...]
    undecided: tuple[int, ...]

    @property
    def is_unanimous(self) -> bool:
        """Whether all hold the same."""
        return not self.wrong and not self.undecided


def vote(rows: Mapping[int, tuple[int, Hashable]]) -> Vote:
    """Return who is right.

    Args:
        rows: For each slot, which shard it holds, and what.

    """
    by_shard: dict[int, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for slot, (shard, held) in sorted(rows.items()):
        by_shard[shard][held].append(slot)
    right: dict[int, tuple[int, ...]] = {}
    wrong: list[int] = []
    undecided: list[int] = []
    for shard, camps in by_shard.items():
        largest = max(camps.values(), key=len)
        others = [slot for camp in camps.values() if camp is not largest for slot in camp]
        if len(largest) > len(others):
            right[shard] = tuple(largest)
            wrong += others
        else:
            undecided += sorted([*largest, *others])
    return Vote(right, tuple(sorted(wrong)), tuple(sorted(undecided)))


def differing(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Return the names of the entries that differ."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
