"""Says in words and in a table how two dumps differ."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ft.dump.diff import Comparison, Row
from lightning_ft.dump.reader import Key

HEADER = ("NAME", "WHERE", "STEP", "BATCH", "MAX ABS", "MAX REL", "COSINE", "NAN", "")


def describe(comparison: Comparison, *, limit: int = 20) -> str:
    """Return what there is to say, the first divergence first.

    Args:
        comparison: The comparison.
        limit: How many lines each list has at most.

    """
    differences = comparison.differences
    lines = []
    if differences:
        first = differences[0]
        what = first.problem or f"max abs {first.max_abs:.3g}, max rel {first.max_rel:.3g}, cosine {first.cosine:.6f}"
        lines.append(f"First divergence: {first.key}: {what}.")
        lines.append("")
        lines += table([HEADER, *map(cells, differences[:limit])])
        lines += [f"... and {len(differences) - limit} more"] if len(differences) > limit else []
        lines.append("")
    factors = sorted({row.batch_factor for row in differences} - {1})
    if factors:
        lines.append(
            f"First dimensions differ by a factor of {', '.join(map(str, factors))}: only the first replica writes, so if"
            " the runs had different numbers of replicas, the one dumped parts of what the other did."
        )
        lines.append("")
    lines += _listed(f"Only in {comparison.first}", comparison.missing, limit)
    lines += _listed(f"Only in {comparison.second}", comparison.extra, limit)
    counts = f"{len(comparison.rows)} compared, {len(differences)} different"
    lines.append(f"{counts}, {len(comparison.missing)} missing, {len(comparison.extra)} extra.")
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns one below another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    """Return what a table says of ``row``."""
    key = row.key
    name = key.name + (f" call {key.call}" if key.call else "")
    place = (key.where, str(key.step), str(key.micro_batch))
    if row.problem:
        return (name, *place, "", "", "", "", row.problem)
    numbers = (f"{row.max_abs:.3g}", f"{row.max_rel:.3g}", f"{row.cosine:.6f}", "/".join(map(str, row.num_nan)))
    kinds = "" if row.dtypes[0] == row.dtypes[1] else f"{row.dtypes[0]} against {row.dtypes[1]}"
    return (name, *place, *numbers, kinds)


def _listed(title: str, keys: Sequence[Key], limit: int) -> list[str]:
    if not keys:
        return []
    lines = [f"{title}: {len(keys)}", *(f"  {key}" for key in keys[:limit])]
    return [*lines, *([f"  ... and {len(keys) - limit} more"] if len(keys) > limit else []), ""]
