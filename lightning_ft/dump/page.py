"""A page with pictures of how two dumps differ: the error of each name over the steps, and how values are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from lightning_ft.dump.diff import Comparison, Row
from lightning_ft.dump.report import HEADER, cells

_NUM_BINS = 60
_MAX_NAMES, _MAX_COLUMNS, _MAX_ROWS = 150, 120, 500
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.35em; } h2 { font-size: 1.1em; margin-top: 2em; } .first { color: #a11; font-weight: 600; }
table { border-collapse: collapse; font-size: 12px; }
td, th { padding: 2px 9px; text-align: right; border-bottom: 1px solid #e4e4e4; }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; font-family: ui-monospace, monospace; }
svg text { font: 11px ui-monospace, monospace; fill: #333; } .charts { display: flex; flex-wrap: wrap; gap: 1.2em; }
figure { margin: 0; } figure svg { margin-right: 14px; }
figcaption { font-size: 12px; max-width: 560px; overflow-wrap: anywhere; }
.note { color: #666; font-size: 12px; }
"""


class Histograms:
    """Keeps how the values of the first things that differ are distributed.

    Args:
        limit: How many things.

    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self.charts: list[str] = []

    def add(self, row: Row, first: Tensor, second: Tensor) -> None:
        """Take in the values of ``row`` in both dumps."""
        if len(self.charts) < self._limit and first.numel():
            self.charts.append(_pair(row, first, second))


def write_page(path: str | Path, comparison: Comparison, histograms: Histograms) -> None:
    """Write the page to a file, which needs no other."""
    differences = comparison.differences
    title = f"{escape(comparison.first)} against {escape(comparison.second)}"
    parts = [f"<h1>{title}</h1>"]
    if differences:
        first = differences[0]
        what = first.problem or f"max abs {first.max_abs:.3g}, max rel {first.max_rel:.3g}, cosine {first.cosine:.6f}"
        parts.append(f'<p class="first">First divergence: {escape(str(first.key))}: {escape(what)}</p>')
    counts = f"{len(comparison.rows)} compared, {len(differences)} different"
    parts.append(f"<p>{counts}, {len(comparison.missing)} missing, {len(comparison.extra)} extra.</p>")
    parts += ["<h2>Largest absolute difference of each name over the steps</h2>", _heatmap(comparison.rows)]
    if histograms.charts:
        parts.append("<h2>Values of what differs first</h2>")
        parts.append(f'<div class="charts">{"".join(histograms.charts)}</div>')
    if differences:
        parts += ["<h2>What differs, in the order of execution</h2>", _table(differences)]
    for name, keys in ((comparison.first, comparison.missing), (comparison.second, comparison.extra)):
        if keys:
            items = "".join(f"<li>{escape(str(key))}</li>" for key in keys[:_MAX_ROWS])
            parts.append(f"<h2>Only in {escape(name)}: {len(keys)}</h2><ul>{items}</ul>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    Path(path).write_text(
        f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n", encoding="utf-8"
    )


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(cell.lower())}</th>" for cell in HEADER)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(row))}</tr>" for row in rows[:_MAX_ROWS])
    more = f'<p class="note">... and {len(rows) - _MAX_ROWS} more.</p>' if len(rows) > _MAX_ROWS else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


# Error of each name over the steps.


def _heatmap(rows: Sequence[Row]) -> str:
    errors: dict[str, dict[int, float]] = {}
    for row in rows:
        name = f"{row.key.where.rpartition('/rollout_')[0]} {row.key.name}".strip()
        error = math.inf if row.problem or math.isnan(row.max_abs) else row.max_abs
        line = errors.setdefault(name, {})
        line[row.key.step] = max(error, line.get(row.key.step, 0.0))
    if not errors:
        return '<p class="note">Nothing is in both.</p>'
    hidden = max(0, len(errors) - _MAX_NAMES)
    names = list(errors)
    if hidden:  # those that are equal everywhere go first
        names = sorted(sorted(names, key=lambda name: not any(errors[name].values()))[:_MAX_NAMES], key=names.index)
    steps = sorted({step for line in errors.values() for step in line})
    per_column = -(-len(steps) // _MAX_COLUMNS)
    columns = [steps[n : n + per_column] for n in range(0, len(steps), per_column)]
    left = 16 + 7.5 * min(58, max(map(len, names)))
    wide = max(6.0, min(26.0, 740 / len(columns)))
    parts = []
    for y, name in enumerate(names):
        shown = name if len(name) <= 58 else f"...{name[-55:]}"
        parts.append(f'<text x="{left - 6:.0f}" y="{16 * y + 30}" text-anchor="end">{escape(shown)}</text>')
        for x, column in enumerate(columns):
            known = [errors[name][step] for step in column if step in errors[name]]
            if known:
                place = f'x="{left + wide * x:.1f}" y="{16 * y + 18}" width="{wide - 1:.1f}" height="15"'
                tip = f"{name}, step {_span(column)}: {max(known):.3g}"
                parts.append(f'<rect {place} fill="{_color(max(known))}"><title>{escape(tip)}</title></rect>')
    bottom = 16 * len(names) + 32
    every = max(1, math.ceil(46 / wide))
    parts += [
        f'<text x="{left + wide * x:.1f}" y="{y}">{column[0]}</text>'
        for x, column in enumerate(columns)
        if x % every == 0
        for y in (12, bottom)
    ]
    svg = f'<svg width="{left + wide * len(columns) + 40:.0f}" height="{bottom + 8}">{"".join(parts)}</svg>'
    more = f" {hidden} names more are not shown." if hidden else ""
    return f'{svg}<p class="note">{_legend()} Above and below: the step.{more}</p>'


def _span(column: Sequence[int]) -> str:
    return str(column[0]) if len(column) == 1 else f"{column[0]} to {column[-1]}"


def _color(error: float) -> str:
    """From yellow, at 1e-8, to dark red, at 1."""
    if error == 0:
        return "#e6ece8"
    if math.isinf(error):
        return "#222"
    share = min(max((math.log10(error) + 8) / 8, 0.0), 1.0)
    return f"hsl({52 - 52 * share:.0f},85%,{72 - 38 * share:.0f}%)"


def _legend() -> str:
    samples = [
        ("equal", 0.0),
        *((f"1e-{n}", 10.0**-n) for n in (8, 6, 4, 2)),
        ("1", 1.0),
        ("NaN or another shape", math.inf),
    ]
    box = '<svg width="12" height="12"><rect width="12" height="12" fill="{}"/></svg> {}'
    return " &#160; ".join(box.format(_color(error), name) for name, error in samples) + "."


# Distributions.


def _pair(row: Row, first: Tensor, second: Tensor) -> str:
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in (first, second)]
    known = [tensor[tensor.isfinite()].reshape(-1) for tensor in real]
    difference = (first - second).abs()
    difference = difference[difference.isfinite() & (difference > 0)].log10()
    values = _bars([("first", known[0], "#3b76b5"), ("second", known[1], "#d98032")], "value")
    errors = _bars([("absolute difference", difference, "#a33")], "logarithmic", is_logarithm=True)
    return f"<figure><figcaption>{escape(str(row.key))}</figcaption>{values}{errors}</figure>"


def _bars(series: Sequence[tuple[str, Tensor, str]], label: str, *, is_logarithm: bool = False) -> str:
    """Return a chart of how many values there are of which size, those of several tensors over each other."""
    everything = torch.cat([values for _, values, _ in series])
    if not everything.numel():
        return ""
    low, high = float(everything.min()), float(everything.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = [torch.histc(values, _NUM_BINS, low, high) for _, values, _ in series]
    top = max(1.0, max(float(count.max()) for count in counts))
    parts = []
    for (_, _, color), count in zip(series, counts, strict=True):
        bars = "".join(
            f"M{4.4 * x:.1f} 110v{-100 * number / top:.1f}h4v{100 * number / top:.1f}z"
            for x, number in enumerate(count.tolist())
            if number
        )
        parts.append(f'<path d="{bars}" fill="{color}" fill-opacity="0.55"/>')
    for x, (name, _, color) in enumerate(series):
        parts.append(f'<text x="{4 + 60 * x}" y="10" style="fill:{color}">{name}</text>')
    parts.append('<path d="M0 110h264" stroke="#888"/>')
    ends = [f"{10**value if is_logarithm else value:.3g}" for value in (low, high)]
    parts.append(f'<text x="0" y="124">{ends[0]}</text>')
    parts.append(f'<text x="132" y="124" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="264" y="124" text-anchor="end">{ends[1]}</text>')
    return f'<svg width="272" height="130">{"".join(parts)}</svg>'
