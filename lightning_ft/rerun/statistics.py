"""How far apart values are that were computed twice, over a training."""

from collections.abc import Iterable, Mapping

from lightning_ft.elastic.checks import check_count

_QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"))


class DeterminismStatistics:
    """The relative differences of one value between a step and its rerun.

    Args:
        max_samples: How many differences other than 0 are kept, the newest ones.

    """

    def __init__(self, max_samples: int = 100_000) -> None:
        check_count("DeterminismStatistics", "max_samples", max_samples, least=1)
        self.num_zeros = 0
        self.largest = 0.0
        self.num_others = 0
        self._max_samples = max_samples
        self._samples: list[float] = []

    def record(self, difference: float) -> None:
        """Take in one difference."""
        if difference == 0.0:
            self.num_zeros += 1
            return
        self.largest = max(self.largest, difference)
        if len(self._samples) < self._max_samples:
            self._samples.append(difference)
        else:
            self._samples[self.num_others % self._max_samples] = difference
        self.num_others += 1

    def merge(self, other: "DeterminismStatistics") -> None:
        """Take in what another rank recorded."""
        self.num_zeros += other.num_zeros
        for sample in other._samples:
            self.record(sample)
        self.largest = max(self.largest, other.largest)

    def row(self) -> dict[str, float]:
        """Return the numbers of a line of a table: counts, quantiles and the largest difference."""
        total = self.num_zeros + self.num_others
        ordered = sorted(self._samples)
        row: dict[str, float] = {"count": total, "different": self.num_others}
        for part, name in _QUANTILES:
            index = int(part * (total - 1)) - self.num_zeros if total else -1
            row[name] = ordered[min(index, len(ordered) - 1)] if index >= 0 and ordered else 0.0
        return {**row, "max": self.largest}


def merged(of_ranks: Iterable[Mapping[str, DeterminismStatistics]]) -> dict[str, DeterminismStatistics]:
    """Return the statistics of all ranks together, by value."""
    result: dict[str, DeterminismStatistics] = {}
    for statistics in of_ranks:
        for name, values in statistics.items():
            result.setdefault(name, DeterminismStatistics()).merge(values)
    return result


def table(statistics: dict[str, DeterminismStatistics]) -> str:
    """Return a table of the statistics of several values, a line each."""
    columns = ["count", "different", *(name for _, name in _QUANTILES), "max"]
    width = max((len(name) for name in statistics), default=0)
    lines = [" ".join([" " * width, *(f"{column:>10}" for column in columns)])]
    for name, values in statistics.items():
        row = values.row()
        lines.append(" ".join([f"{name:<{width}}", *(f"{row[column]:>10.4g}" for column in columns)]))
    return "\n".join(lines)
