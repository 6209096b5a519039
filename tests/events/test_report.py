import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.report import SyntheticRun, write
from lightning_ft import cli
from lightning_ft.events.history import find_run
from lightning_ft.events.html import to_html
from lightning_ft.events.report import Report, duration
from lightning_ft.events.story import Curve

Record = dict[str, Any]


def record(run: Path, *more: Record, without: tuple[str, ...] = ()) -> Path:
    run.mkdir(parents=True)
    events = list(SyntheticRun(3, epoch_tickets=240, period=60).events(1600))
    events = [event for event in events if event["event"] not in without]
    write(iter([*events[:-1], *more, events[-1]]), run)
    return run


def test_a_report_tells_what_happened(tmp_path: Path) -> None:
    run = record(tmp_path / "logs" / "ft_events" / "abc")
    report = Report.of(find_run(tmp_path))
    lines = "\n".join(report.lines())
    assert "3 slots" in lines
    assert "ended well" in lines
    assert re.search(r"deaths +6;", lines)
    assert re.search(r"returns +6;", lines)
    assert re.search(r"checkpoints +\d saved, 1 to be there, 0 failed", lines)
    assert "FAIL" not in lines
    assert lines.count("x") >= 6
    (goodput,) = (value for name, value in report.summary() if name == "goodput")
    assert 80 < float(goodput.partition(" ")[0]) < 100
    assert "missing" in goodput
    assert report.directory == run


def test_exclusions_are_no_deaths_and_what_time_went_to_adds_up(tmp_path: Path) -> None:
    out: Record = {
        "t": 1_700_000_000.5,
        "event": "exit",
        "slot": 1,
        "incarnation": 0,
        "code": -9,
        "member": False,
        "ago": 0.0,
    }
    spawned = {"t": 1_700_000_000.6, "event": "spawn", "slot": 1, "incarnation": 1, "pid": 5}
    account = {"t": 1_700_000_000.7, "event": "goodput", "slot": 0, "incarnation": 0, "step": 9, "seconds": 40.0}
    account |= {"goodput": 0.25, "lost_recovery": 20.0, "lost_missing": 10.0}
    report = Report.of(record(tmp_path / "abc", {**out, "how": "excluded: suspended"}, spawned, account))
    summary = dict(report.summary())
    assert re.match("6;", summary["deaths"])
    assert re.match("1, suspended", summary["excluded"])
    told = summary["goodput"]
    assert told == "25.0 % of 40.0 s (by TrainingHealth); recovery 50.0 %; missing replicas 25.0 %"
    assert "slot 1 was excluded: suspended" in "\n".join(report.lines())
    parts = re.findall(r"(useful|recovery|missing replicas) ([\d.]+) %", to_html(report))
    assert parts[-3:] == [("useful", "25.00"), ("recovery", "50.00"), ("missing replicas", "25.00")]


def test_the_html_report_needs_nothing_else_and_its_charts_show_each_death(tmp_path: Path) -> None:
    bad = {"t": 1_700_000_000.5, "slot": 0, "incarnation": 0, "event": "checksum", "step": 100, "digest": "<&>"}
    run = record(tmp_path / "abc", bad, {**bad, "digest": "other"})
    page = to_html(Report.of(run))
    assert re.findall(r"(?:src|href)=", page) == []
    svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(svgs) == 3
    titles = [title.text or "" for svg in svgs for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("died: SIGKILL" in title for title in titles) == 6
    assert sum("died (SIGKILL)" in title for title in titles) == 12
    assert "hold other weights" in page
    assert "replicas-alike" in page


def test_strict_fails_if_a_rule_is_violated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "one", without=("checkpoint",))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["report", str(run), "--strict", "--html", str(tmp_path / "new" / "report.html")])
    assert (tmp_path / "new" / "report.html").stat().st_size > 1000
    run = record(tmp_path / "two")  # whose checkpoints were never there
    with pytest.raises(SystemExit, match="1"):
        cli.main(["report", str(run), "--strict"])
    assert "FAIL  checkpoints-intact" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["report", str(run), "--strict", "--no-checkpoints"])
    with pytest.raises(SystemExit, match="There are no events in"):
        cli.main(["report", str(tmp_path / "new")])


def test_events_are_printed_as_lines_for_grep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "one")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["log", str(run), "--event", "joined", "--event", "run"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first.endswith("event=run slot=- incarnation=0 run_id=synthetic num_slots=3 pid=1")
    assert len(others) == 6
    assert all("event=joined" in line for line in others)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["log", str(run), "--event", "jioned"])
    with pytest.raises(SystemExit):
        cli.main(["data", str(tmp_path / "one")])
    assert capsys.readouterr().out.startswith("epoch 0: 240 of 240 batches trained")
    with pytest.raises(SystemExit, match="There are no events in"):
        cli.main(["data", str(tmp_path / "two")])


def test_an_event_that_is_damaged_is_told_and_spoils_nothing(tmp_path: Path) -> None:
    odd: list[Record] = [
        {"t": 1_700_000_000.7, "event": "step", "slot": 0, "incarnation": 0, "step": "many"},
        {"t": 1_700_000_000.7, "event": "generation", "slot": 0, "incarnation": 0},
        {"t": 1_700_000_000.7, "event": "mine", "slot": 0, "incarnation": 0, "any": [1, {"thing": None}]},
    ]
    run = record(tmp_path / "one", *odd)
    with open(run / "slot_0.incarnation_0.jsonl", "ab") as file:
        file.write(b'{"t":1.0,"event":"st')
    report = Report.of(run)
    assert {violation.rule for violation in report.analysis.violations} == {"well-formed"}
    assert len(report.analysis.violations) == 2
    assert report.num_torn == 1
    assert "1 lines were cut off" in "\n".join(report.lines())
    assert to_html(report)


def test_a_curve_of_any_length_has_a_bounded_number_of_points_and_keeps_its_extremes() -> None:
    curve = Curve()
    for step in range(1, 30_001):
        curve.add(step, 100.0 if step == 17_345 else float("nan") if step == 20_000 else step % 10)
    points = curve.points()
    assert 1000 < len(points) <= 4000
    assert max(point[3] for point in points) == 100.0
    assert min(point[1] for point in points) == 0.0
    assert [step for step, *_ in points] == sorted(step for step, *_ in points)
    assert curve.bad == [20_000]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0123, "12 ms"), (12.34, "12.3 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_is_told_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
