"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from lightning_ft.events.contents import Event
from lightning_ft.events.report import Report, duration, lost_to
from lightning_ft.events.svg import LEGEND, curve, timeline

_MAX_ROWS = 200
_COLOURS = {
    "useful": "#2e7d32",
    "startup": "#90a4ae",
    "restart": "#607d8b",
    "recovery": "#c62828",
    "joining": "#ef6c00",
    "missing": "#f9a825",
    "recomputation": "#8e24aa",
    "checkpoint": "#1565c0",
}
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fafafa;margin:0}
main{max-width:1060px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:34px 0 8px}
.path{color:#666;font:13px ui-monospace,monospace;word-break:break-all}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.card{background:#fff;border:1px solid #ddd;border-radius:8px;padding:10px 16px;min-width:120px;flex:1}
.card b{display:block;font-size:21px;font-weight:600;white-space:nowrap}.card span{color:#555;font-size:13px}
.good b{color:#2e7d32}.bad b{color:#c62828}
svg{width:100%;height:auto;background:#fff;border:1px solid #ddd;border-radius:8px;display:block}
svg text{font:11px system-ui,sans-serif;fill:#555}
svg .label{text-anchor:end}svg .tick{text-anchor:middle}
svg .mark{font:bold 15px ui-monospace,monospace;text-anchor:middle}
svg .away{fill:#eceff1}svg .in{fill:#90caf9}
svg .grid{stroke:#eee}svg .event{stroke-width:1.4;stroke-dasharray:4 3;opacity:.75}
svg .range{fill:#90caf9;opacity:.5}svg .curve{fill:none;stroke:#1565c0;stroke-width:1.3}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;border:1px solid #ddd}
.legend{font-size:13px;color:#444;margin:6px 0;display:flex;flex-wrap:wrap;gap:4px 18px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.legend b{font:bold 15px ui-monospace,monospace;margin-right:5px}
table{border-collapse:collapse;width:100%;background:#fff;border:1px solid #ddd;font-size:14px}
td,th{text-align:left;padding:4px 10px;border-bottom:1px solid #eee;vertical-align:top}
th{background:#f3f3f3;font-weight:600}td{font-variant-numeric:tabular-nums}td:first-child{white-space:nowrap}
.fail{color:#c62828;font-weight:600}.ok{color:#2e7d32;font-weight:600}
details{margin:8px 0}summary{cursor:pointer;color:#1565c0}
"""


def to_html(report: Report) -> str:
    """Return the report as one HTML document."""
    body = "\n".join(_body(report))
    title = f"Run {escape(report.directory.name)}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body><main>\n{body}\n</main></body></html>\n"


def _body(report: Report) -> Iterator[str]:
    story = report.story
    yield f"<h1>Run {escape(report.directory.name)}</h1><div class=path>{escape(str(report.directory))}</div>"
    yield from _cards(report)
    if report.analysis.violations:
        yield "<h2>Violations</h2>"
        rows = [(violation.rule, violation.text) for violation in report.analysis.violations]
        yield from _table(("rule", "what is wrong"), rows)
    yield "<h2>Who took part</h2>"
    ticks = [(story.seconds * i / 4, duration(story.seconds * i / 4) if i else "start") for i in range(5)]
    yield timeline(story, ticks)
    symbols = "".join(f'<span><b style="color:{colour}">{escape(s)}</b>{told}</span>' for s, colour, told in LEGEND)
    yield f'<div class=legend><span><i style="background:#90caf9"></i>takes part</span>{symbols}</div>'
    yield from _curves(report)
    yield from _time(report)
    yield from _rules(report)
    yield from _lists(report)


def _cards(report: Report) -> Iterator[str]:
    story, audit = report.story, report.audit
    count = len(report.analysis.violations)
    goodput = story.goodput(audit)
    ended = {None: "running", 0: "ended well"}.get(audit.exit_code, f"code {audit.exit_code}")
    lost = sum(len(fit.steps_lost) for fit in report.analysis.fits)
    cards = [
        (
            "bad" if audit.exit_code else "good",
            ended,
            f"{story.num_slots or len(story.spans)} slots, {duration(story.seconds)}",
        ),
        ("bad" if count else "good", str(count), "violations"),
        ("bad" if lost else "good", str(lost), f"steps lost of {sum(len(fit.steps) for fit in report.analysis.fits)}"),
        ("", str(len(report.deaths)), f"deaths, {len(report.joins)} returns"),
        ("", str(len(story.checkpoints)), f"checkpoints, {len(story.failed_saves)} failed"),
    ]
    if goodput is not None:
        cards.append(("", f"{100 * goodput:.1f} %", "goodput"))
    inner = "".join(
        f'<div class="card {kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for kind, value, name in cards
    )
    yield f"<div class=cards>{inner}</div>"
    yield from _table((), report.summary())


def _curves(report: Report) -> Iterator[str]:
    story = report.story
    marks = [(death.step, "death", f"slot {death.slot} died ({death.how})") for death in report.deaths]
    marks += [(join.step, "join", f"slot {join.slot} is back") for join in report.joins]
    marks += [(v["step"], "resumed" if v["outcome"] == "continuous" else "corruption", _verdict(v)) for v in story.verdicts]
    for name, values in (("Loss", story.loss), ("Gradient norm", story.grad_norm)):
        if drawn := curve(values, marks):
            yield f"<h2>{name}</h2>{drawn}"
    if not story.counts["metrics"]:
        yield "<p>No values of steps were recorded; <code>TrainingHealth</code> does.</p>"


def _verdict(verdict: Event) -> str:
    return f"after {verdict['reason']}: {verdict['outcome']}"


def _time(report: Report) -> Iterator[str]:
    story = report.story
    lost = {kind: seconds for kind, seconds in story.time_lost(report.audit).items() if seconds > 0}
    if story.goodput(report.audit) is None:
        return
    whole = max(story.accounted_seconds, sum(lost.values()), 1e-9)
    parts = {"useful": whole - sum(lost.values()), **lost}
    bar = "".join(
        f'<div style="width:{100 * seconds / whole:.3f}%;background:{_COLOURS[kind]}" title="{kind}"></div>'
        for kind, seconds in parts.items()
    )
    legend = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{lost_to(kind)} {100 * seconds / whole:.2f} %'
        f" ({duration(seconds)})</span>"
        for kind, seconds in parts.items()
    )
    yield f"<h2>Where the time went</h2><div class=bar>{bar}</div>"
    yield f"<div class=legend>{legend}<span>{report.account()}</span></div>"


def _rules(report: Report) -> Iterator[str]:
    yield "<h2>Rules</h2>"
    rows = "".join(
        f"<tr><td class={'fail' if count else 'ok'}>{'not looked at' if count is None else count or 'ok'}</td>"
        f"<td>{name}</td><td>{escape(told)}</td></tr>"
        for name, told, count in report.judged_rules()
    )
    yield f"<table>{rows}</table>"


def _lists(report: Report) -> Iterator[str]:
    story = report.story

    def at(time: float) -> str:
        return duration(max(0.0, time - story.begin))

    ended = sorted([*report.deaths, *report.excluded], key=lambda death: death.time)
    deaths = [(at(d.time), d.slot, d.step, d.how, _or_none(d.stall), _or_none(d.respawn)) for d in ended]
    names = ("after", "slot", "step", "how", "its step took longer by", "back in a step after")
    yield from _fold("deaths and exclusions", names, deaths)
    joins = [(at(j.time), j.slot, j.step, _or_none(j.gap)) for j in report.joins]
    yield from _fold("returns", ("after", "slot", "step", "the others' step took longer by"), joins)
    saves = [
        (at(c.time), c.step, c.path, duration(c.stall), "removed" if c.gone else "") for c in story.checkpoints.values()
    ]
    yield from _fold("checkpoints", ("after", "step", "path", "training waited", ""), saves)
    failed = [(step, path, error) for (path, step), error in story.failed_saves.items()]
    yield from _fold("failed checkpoints", ("step", "path", "why"), failed)
    verdicts = [(v["step"], v["reason"], v["outcome"], v["series"], v.get("usual"), v.get("value")) for v in story.verdicts]
    yield from _fold("verdicts", ("step", "after", "outcome", "seen in", "usual", "found"), verdicts)
    others = [(at(m.time), m.text) for m in story.marks if m.kind not in ("death", "join", "save", "failed_save")]
    yield from _fold("other events", ("after", "what"), others)


def _or_none(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _fold(name: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    if rows:
        yield f"<details{' open' if len(rows) <= 10 else ''}><summary>{len(rows)} {name}</summary>"
        yield from _table(heads, rows)
        yield "</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    rows = list(rows)
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in heads)}</tr>" if heads else ""
    cells = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows[:_MAX_ROWS])
    yield f"<table>{head}{cells}</table>"
    if len(rows) > _MAX_ROWS:
        yield f"<p>and {len(rows) - _MAX_ROWS} more</p>"


def _cell(value: object) -> str:
    return "" if value is None else escape(f"{value:.4g}" if isinstance(value, float) else str(value))
