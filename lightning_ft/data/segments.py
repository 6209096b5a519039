"""Sequences of tickets as a few ranges, so that their size does not depend on how many tickets there are."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby


class SegmentPool:
    """The tickets of a round in dealing order: ranges one after another, never written out.

    Args:
        segments: The ranges.

    """

    def __init__(self, segments: Iterable[range]) -> None:
        self.segments = [segment for segment in segments if segment]
        self._ends = list(accumulate(map(len, self.segments)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        number = bisect_right(self._ends, index)
        return self.segments[number][index - self._ends[number]]  # counted from the segment's end

    def every(self, stride: int, first: int) -> Iterator[range]:
        """The tickets at ``first``, ``first + stride``, ..., as segments; costs as much as there are of these."""
        while first < len(self):
            number = bisect_right(self._ends, first)
            segment = self.segments[number]
            part = segment[first - self._ends[number] + len(segment) :: stride]
            yield part
            first += stride * len(part)


def merge_segments(segments: Iterable[range]) -> list[range]:
    """The same tickets in the same order, in fewer segments: neighbours that continue each other become one."""
    merged: list[range] = []
    for segment in segments:
        last = merged[-1] if merged else range(0)
        step = last.step if len(last) > 1 else segment[0] - last[0] if last else 0
        if step and segment[0] == last[-1] + step and (len(segment) == 1 or segment.step == step):
            merged[-1] = range(last[0], segment[-1] + (1 if step > 0 else -1), step)
        else:
            merged.append(segment)
    return merged


def to_triples(segments: Iterable[range]) -> list[list[int]]:
    """Segments as JSON data."""
    return [[segment.start, segment.stop, segment.step] for segment in segments]


def from_triples(triples: Iterable[Sequence[int]]) -> list[range]:
    """Segments from what :func:`to_triples` returned."""
    return [range(start, stop, step) for start, stop, step in triples]


def to_runs(values: Iterable[int]) -> list[list[int]]:
    """``[[value, how often in a row], ...]``: slots are mostly at the same position."""
    return [[value, sum(1 for _ in group)] for value, group in groupby(values)]


def from_runs(runs: Iterable[Sequence[int]]) -> Iterator[int]:
    """Numbers from what :func:`to_runs` returned."""
    return chain.from_iterable([value] * count for value, count in runs)
