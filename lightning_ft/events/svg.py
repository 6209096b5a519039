"""Charts of a report as SVG: who took part when, and a curve over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from lightning_ft.events.story import Curve, Mark, Story

WIDTH = 1000
_LEFT, _RIGHT = 70, 965
_ROW = 22
_HEIGHT = 220
_SYMBOLS = {
    "death": ("x", "#c62828"),
    "hung": ("x", "#c62828"),
    "excluded": ("!", "#c62828"),
    "straggler": ("~", "#ef6c00"),
    "join": ("o", "#2e7d32"),
    "save": ("^", "#1565c0"),
    "failed_save": ("^", "#c62828"),
    "control": ("*", "#6a1b9a"),
    "rewound": ("<", "#ef6c00"),
    "resumed": (">", "#2e7d32"),
    "begun_anew": ("<", "#c62828"),
    "corruption": ("!", "#c62828"),
    "stall": ("~", "#ef6c00"),
}
LEGEND = (
    ("x", "#c62828", "died"),
    ("!", "#c62828", "was excluded, stays out, or differs from the others"),
    ("o", "#2e7d32", "is back"),
    ("^", "#1565c0", "checkpoint"),
    ("<", "#ef6c00", "went back to a snapshot"),
    (">", "#2e7d32", "resumed"),
    ("*", "#6a1b9a", "asked for"),
)
"""Symbol, colour and meaning."""


def timeline(story: Story, tell_time: Iterable[tuple[float, str]]) -> str:
    """Return who took part when, a row for each slot, and one for what concerns all.

    Args:
        story: Of the run.
        tell_time: Seconds since its beginning, and how the axis names them.

    """
    slots = sorted(story.spans)
    seconds = story.seconds or 1.0

    def x(time: float) -> float:
        part = (min(max(time, story.begin), story.end) - story.begin) / seconds
        return _LEFT + part * (_RIGHT - _LEFT)

    height = _ROW * (len(slots) + 1) + 24
    rows = {slot: i * _ROW for i, slot in enumerate(slots)}
    parts = [f'<text x="{_LEFT - 8}" y="{rows[slot] + 15}" class="label">slot {slot}</text>' for slot in slots]
    for slot in slots:
        parts.append(f'<rect x="{_LEFT}" y="{rows[slot] + 3}" width="{_RIGHT - _LEFT}" height="{_ROW - 6}" class="away"/>')
        for first, last in story.spans[slot]:
            width = max(0.7, x(last) - x(first))
            parts.append(
                f'<rect x="{x(first):.1f}" y="{rows[slot] + 3}" width="{width:.1f}" height="{_ROW - 6}" class="in"/>'
            )
    parts.append(f'<text x="{_LEFT - 8}" y="{_ROW * len(slots) + 15}" class="label">all</text>')
    parts += _marks(story.marks, rows, _ROW * len(slots), x)
    for after, words in tell_time:
        at = x(story.begin + after)
        parts.append(f'<text x="{at:.1f}" y="{height - 4}" class="tick">{escape(words)}</text>')
    return _svg(height, parts)


def _marks(marks: Sequence[Mark], rows: dict[int, int], last_row: int, x: Callable[[float], float]) -> list[str]:
    """The symbols, joins below deaths; those that would lie on one another are drawn once, and tell how many they are."""
    found: dict[tuple[int, int, str], list[Mark]] = {}
    for mark in marks:
        if mark.kind in _SYMBOLS:
            row = last_row if mark.slot is None else rows.get(mark.slot, last_row)
            found.setdefault((row, round(x(mark.time) / 3), mark.kind), []).append(mark)
    parts = []
    for (row, _, kind), group in sorted(found.items(), key=lambda item: item[0][2] in ("death", "hung")):
        symbol, colour = _SYMBOLS[kind]
        text = group[0].text + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        at = x(group[0].time)
        inner = f"{escape(symbol)}<title>{escape(text)}</title>"
        parts.append(f'<text x="{at:.1f}" y="{row + 15}" class="mark" style="fill:{colour}">{inner}</text>')
    return parts


def curve(values: Curve, marks: Sequence[tuple[int, str, str]]) -> str:
    """Return a curve over steps with the range of its values, and vertical lines where something happened.

    Args:
        values: The curve.
        marks: The step, the kind and the words of each.

    """
    points = values.points()
    if not points:
        return ""
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high, is_log = _scale(points)
    bottom = _HEIGHT - 24

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        place = math.log10(max(value, low)) if is_log else value
        least, most = (math.log10(low), math.log10(high)) if is_log else (low, high)
        return bottom - min(1.0, max(0.0, (place - least) / (most - least))) * (bottom - 10)

    parts = []
    for value in _ticks(low, high, is_log):
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" class="label">{value:.3g}</text>')
    for i in range(5):
        step = first + (last - first) * i / 4
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 4}" class="tick">{"step " if not i else ""}{step:.0f}</text>')
    parts += _lines(marks, first, last, bottom, x)
    upper = " ".join(f"{x(step):.1f},{y(most):.1f}" for step, _, _, most in points)
    lower = " ".join(f"{x(step):.1f},{y(least):.1f}" for step, least, _, _ in reversed(points))
    parts.append(f'<polygon points="{upper} {lower}" class="range"/>')
    parts.append(f'<polyline points="{" ".join(f"{x(p[0]):.1f},{y(p[2]):.1f}" for p in points)}" class="curve"/>')
    parts += [
        f'<text x="{x(step):.1f}" y="12" class="mark" style="fill:#c62828">?<title>not finite at step {step}</title></text>'
        for step in sorted({round(step) for step in values.bad})[:200]
        if first <= step <= last
    ]
    return _svg(_HEIGHT, parts)


def _lines(
    marks: Sequence[tuple[int, str, str]], first: float, last: float, bottom: int, x: Callable[[float], float]
) -> list[str]:
    drawn: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for step, kind, words in marks:
        if first <= step <= last:
            drawn.setdefault((round(x(step) / 2), kind), []).append((step, words))
    parts = []
    for (_, kind), group in drawn.items():
        step, words = group[0]
        text = f"step {step}: {words}" + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        at = x(step)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{bottom}" class="event" stroke="{_SYMBOLS[kind][1]}">'
            f"<title>{escape(text)}</title></line>"
        )
    return parts


def _scale(points: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, bool]:
    """The range of values that is shown, and whether its axis is logarithmic."""
    low, high = min(point[1] for point in points), max(point[3] for point in points)
    if low > 0 and high / low > 50:
        return low, high, True
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin, False


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    if is_log:
        found = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        return found or [low, high]
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img">{"".join(parts)}</svg>'
