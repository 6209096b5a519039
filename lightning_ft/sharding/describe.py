"""Says how a module is sharded, for people."""

from collections.abc import Sequence

from lightning_ft.sharding.plan import Unit
from lightning_ft.sharding.sizes import training_bytes


def describe_units(units: Sequence[Unit], shard_size: int) -> str:
    """Return a table of the units: their parameters, what a gather takes, and what a rank holds.

    Args:
        units: As :func:`plan_units` returns them.
        shard_size: Ranks of a replica.

    """
    rows = [("unit", "module", "parameters", "gathered", "a rank")]
    for unit in units:
        name, size = unit.name or "(root)", unit.num_bytes
        rows.append((name, type(unit.module).__name__, f"{unit.num_elements:,}", _bytes(size), _bytes(size / shard_size)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if n < 2 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    state = training_bytes(units[-1].module) / shard_size
    lines.append(f"With gradients and the state of Adam a rank holds {_bytes(state)} of {shard_size} shards.")
    return "\n".join(lines)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
