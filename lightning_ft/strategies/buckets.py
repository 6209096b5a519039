"""The messages in which gradients are averaged: parameters of one kind, side by side in one tensor."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_ft.rerun.gradient_norm import TotalNorm

_SPARE_BYTES = 16 << 20


class Bucket:
    """Parameters that are reduced in one message.

    Args:
        parameters: Of one dtype and device, in the order in which backward is expected to reach them.
        num_flags: Extra elements at the end: for every parameter of the model 1 if it has a gradient here, then 1
            unless a gradient was added to after its reduction had begun.

    """

    def __init__(self, parameters: list[Parameter], num_flags: int) -> None:
        self.parameters = parameters
        with torch.no_grad():
            shapes = [local_part(p).shape for p in parameters]
        numels = [shape.numel() for shape in shapes]
        of_kind: dict[str, Any] = {"dtype": parameters[0].dtype, "device": parameters[0].device} if parameters else {}
        self.flat = torch.ones(sum(numels) + num_flags, **of_kind)
        self.message = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        self.gradients, flags = self.flat.split([sum(numels), num_flags])
        self.flags = flags.real
        parts = self.gradients.split(numels)
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @torch.no_grad()  # a backward pass with `create_graph=True` calls hooks with gradients enabled
    def fill(self, scale: float, norm: TotalNorm | None = None) -> None:
        """Overwrite the message with the gradients of this rank, times ``scale``; add them to ``norm``."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None or scale == 0.0:
                view.zero_()
            elif norm is None:
                torch.mul(local_part(parameter.grad), scale, out=view)
            else:
                norm.add_and_scale(local_part(parameter.grad), scale, view)


@torch.no_grad()
def write_back(gradients: list[Tensor], averages: list[Tensor], norm: TotalNorm | None) -> None:
    """Overwrite ``gradients``; add what they are then to ``norm``."""
    if norm is not None:
        for gradient, average in zip(gradients, averages, strict=True):
            norm.copy_and_add(average, gradient)
    elif gradients:
        torch._foreach_copy_(gradients, averages)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank holds: all of it, unless it is sharded. Without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_gradient(parameter: Parameter, local: Tensor) -> Tensor:
    """Return a gradient of ``parameter`` of which this rank holds ``local``."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class Layout:
    """The buckets of the parameters that require gradients at some time.

    Args:
        parameters: Those parameters, in the module's order.
        bucket_bytes: Size above which a bucket is closed.
        sparse: Those whose gradients are sparse.

    """

    def __init__(self, parameters: list[Parameter], bucket_bytes: int, sparse: Collection[Parameter]) -> None:
        self.parameters = parameters
        self.sparse = [p for p in parameters if p in sparse]
        self.buckets = self._make_buckets(bucket_bytes)
        bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self.bucket_of = [bucket_of.get(p, len(self.buckets) - 1) for p in parameters]  # sparse ones come with the last
        flags = sum(bucket.flags.numel() * bucket.flat.element_size() for bucket in self.buckets)
        # Of whole parameters, not of shards: the same on all ranks.
        dense = [p for bucket in self.buckets for p in bucket.parameters]
        self.num_bytes = sum(p.numel() * p.element_size() for p in dense) + flags
        # A second set, filled in turn, if it costs little: see `GradientReducer._may_launch`.
        self.spare = self._make_buckets(bucket_bytes) if self.num_bytes <= _SPARE_BYTES else None

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        dense = [p for p in self.parameters if not any(p is q for q in self.sparse)]
        return make_buckets(dense, bucket_bytes, num_flags=len(self.parameters) + 1)


def make_buckets(parameters: list[Parameter], bucket_bytes: int, num_flags: int) -> list[Bucket]:
    """Group parameters, last ones first as backward reaches them; one dtype and device a bucket."""
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group, size = open_groups.pop(kind, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size < bucket_bytes:
            open_groups[kind] = (group, size)
    if not groups and num_flags > 1:
        groups.append([])  # all gradients are sparse, and yet it must be told who has some
    make = [partial(Bucket, group, 0) for group in groups[:-1]]
    make += [partial(Bucket, group, num_flags) for group in groups[-1:]]
    return [bucket() for bucket in make]
