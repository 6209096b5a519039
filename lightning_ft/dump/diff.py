"""Compares two dumps: what is in both, by name, rollout, step and batch, in the order of execution."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_ft.dump.reader import Key, Record, read_records
from lightning_ft.errors import DumpError


@dataclass(frozen=True)
class Row:
    """How far something in one dump is from the same in the other.

    Args:
        key: What it is.
        is_equal: Whether all values are, within the tolerances.
        problem: Why values could not be compared, if so.
        max_abs: The largest absolute difference.
        max_rel: The largest difference relative to the larger of both values.
        cosine: Of the angle between both, seen as vectors; NaN if one of them is 0.
        num_nan: How many values are NaN, in both dumps.
        dtypes: In both dumps.
        batch_factor: How many times as many samples one dump has as the other, where only that number differs; else 1.

    """

    key: Key
    is_equal: bool
    problem: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    num_nan: tuple[int, int] = (0, 0)
    dtypes: tuple[str, str] = ("", "")
    batch_factor: int = 1


@dataclass(frozen=True)
class Comparison:
    """What two dumps have in common, and what not.

    Args:
        first: Path of the first.
        second: Path of the second.
        rows: What is in both, in the order of execution.
        missing: What only the first has.
        extra: What only the second has.

    """

    first: str
    second: str
    rows: list[Row] = field(default_factory=list)
    missing: list[Key] = field(default_factory=list)
    extra: list[Key] = field(default_factory=list)

    @property
    def differences(self) -> list[Row]:
        """The rows that are not equal, the first divergence first."""
        return [row for row in self.rows if not row.is_equal]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same."""
        return not (self.missing or self.extra or self.differences)


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: Callable[[str], bool] = lambda name: True,
    on_different: Callable[[Row, Tensor, Tensor], None] | None = None,
) -> Comparison:
    """Compare two dumps, or the same part of two dumps.

    What several ranks dumped of one step is put together where the other dump has it from another number of ranks: samples
    along the first dimension, in turn or one rank's behind another's, whichever is nearer; gradients as those of the mean
    loss, single values as their mean. Of several replicas only the first one writes: what it dumped of its own batches
    has no counterpart in a run on another number of replicas, whose batches are larger or smaller: shapes differ.

    Args:
        first: A directory with attempts at or below it.
        second: Another one of the same level.
        rtol: How far values may differ, relative to the second.
        atol: How far they may differ besides.
        only: Says by the name what is compared.
        on_different: Called with what differs, and its values as floating-point numbers.

    Raises:
        DumpError: If one of them can't be read, or nothing can be compared.
        ValueError: If a tolerance is not valid.

    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise ValueError(f"`compare({name}={value!r})` is not valid: expected a number, 0 or more.")
    records, others = read_records(first), read_records(second)
    comparison = Comparison(str(first), str(second))
    for key, record in records.items():
        if not only(key.name):
            continue
        other = others.get(key)
        if other is None:
            comparison.missing.append(key)
        else:
            comparison.rows.append(_compare(key, record, other, rtol, atol, on_different))
    comparison.extra.extend(key for key in others if key not in records and only(key.name))
    if not comparison.rows:
        _check_that_something_is_common(comparison)
    return comparison


def _check_that_something_is_common(comparison: Comparison) -> None:
    first, second = comparison.first, comparison.second
    if comparison.missing and comparison.extra:
        raise DumpError(
            first,
            f"it has nothing in common with {second}; compare those of the same level (role, phase, rollout or attempt) and"
            f" of the same steps: the one has `{comparison.missing[0]}`, the other `{comparison.extra[0]}`",
            "be compared",
        )
    if not comparison.missing and not comparison.extra:
        raise DumpError(first, f"neither it nor {second} has anything of the names that were asked for", "be compared")


def assert_dumps_equal(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert that two dumps hold the same, bit for bit unless there are tolerances.

    Args:
        first: As in :func:`compare`.
        second: As in :func:`compare`.
        rtol: As in :func:`compare`.
        atol: As in :func:`compare`.

    Raises:
        AssertionError: If not, with the first divergence and a table.
        DumpError: If one of them can't be read.

    """
    from lightning_ft.dump.report import describe

    comparison = compare(first, second, rtol=rtol, atol=atol)
    assert comparison.is_equal, describe(comparison)


def _compare(
    key: Key,
    first: Record,
    second: Record,
    rtol: float,
    atol: float,
    on_different: Callable[[Row, Tensor, Tensor], None] | None,
) -> Row:
    dtypes = first.entries[0].dtype, second.entries[0].dtype
    if first.is_same_as(second):
        return Row(key, True, dtypes=dtypes)
    pairs = [(_as_numbers(a), _as_numbers(b)) for a, b in _joined(key, first.load(), second.load()) if a.shape == b.shape]
    if not pairs:
        shapes = [" + ".join(str(list(entry.shape)) for entry in record.entries) for record in (first, second)]
        factor = _batch_factor(first.entries[0].shape, second.entries[0].shape)
        return Row(key, False, f"shape {shapes[0]} against {shapes[1]}", dtypes=dtypes, batch_factor=factor)
    rows = [_measure(key, a, b, rtol, atol, dtypes) for a, b in pairs]
    nearest = min(range(len(rows)), key=lambda n: (not rows[n].is_equal, rows[n].max_abs))
    if not rows[nearest].is_equal and on_different is not None:
        on_different(rows[nearest], *pairs[nearest])
    return rows[nearest]


def _batch_factor(first: Sequence[int], second: Sequence[int]) -> int:
    if not (first and second and first[1:] == second[1:] and min(first[0], second[0]) > 0):
        return 1
    factor, rest = divmod(max(first[0], second[0]), min(first[0], second[0]))
    return 1 if rest else factor


def _measure(key: Key, a: Tensor, b: Tensor, rtol: float, atol: float, dtypes: tuple[str, str]) -> Row:
    num_nan = int(a.isnan().sum()), int(b.isnan().sum())
    is_same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(is_same, 0.0, (a - b).abs())
    is_close = is_same | (difference <= atol + rtol * b.abs())
    is_close &= a.isnan() == b.isnan()
    scale = torch.maximum(a.abs(), b.abs())
    relative = torch.where(difference == 0, 0.0, difference / scale)
    return Row(
        key,
        bool(is_close.all()),
        "",
        _largest(difference),
        _largest(relative),
        _cosine(a, b),
        num_nan,
        dtypes,
    )


def _largest(values: Tensor) -> float:
    """Return the largest value; NaN, which is larger than any, if there is one."""
    return float(values.max()) if values.numel() else 0.0


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.reshape(-1), b.reshape(-1)
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    norms = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return float(torch.vdot(a, b).real / norms) if norms > 0 else float("nan")


def _as_numbers(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _joined(key: Key, first: Sequence[Tensor], second: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what both dumps have as one tensor each, in the ways in which samples may have been dealt to ranks."""
    if len(first) == len(second) and [a.shape for a in first] == [b.shape for b in second]:
        if len(first) == 1:
            yield first[0], second[0]
        else:
            yield torch.cat([a.reshape(-1) for a in first]), torch.cat([b.reshape(-1) for b in second])
        return
    is_gradient = key.name.startswith("grad_")
    for in_turn in (True, False):
        a, b = (_as_one(tensors, is_gradient, in_turn) for tensors in (first, second))
        if a is not None and b is not None:
            yield a, b


def _as_one(tensors: Sequence[Tensor], is_gradient: bool, in_turn: bool) -> Tensor | None:
    if len(tensors) == 1:
        return tensors[0]
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack([_as_numbers(tensor) for tensor in tensors]).mean(0)
    if any(tensor.dim() == 0 or tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
        return None
    tensors = [_as_numbers(tensor) / len(tensors) if is_gradient else tensor for tensor in tensors]
    if not in_turn:
        return torch.cat(list(tensors))
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        return None
    return torch.stack(list(tensors), dim=1).flatten(0, 1)
