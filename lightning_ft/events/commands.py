"""The commands ``lightning-ft report`` and ``lightning-ft log``."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ft.checkpoint.verify import damage
from lightning_ft.events.history import RUN, EventStream, find_run
from lightning_ft.events.html import to_html
from lightning_ft.events.kinds import KINDS, as_words
from lightning_ft.events.report import Report


def add_report_to(parser: argparse.ArgumentParser) -> None:
    """Describe the command ``lightning-ft report``."""
    parser.add_argument("where", type=Path, metavar="RUN", help=RUN)
    parser.add_argument("--strict", action="store_true", help="fail if a rule is violated")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report with its charts to this file, too")
    parser.add_argument("--no-checkpoints", action="store_true", help="do not look at the checkpoints that should be there")
    parser.set_defaults(run=_report)


def add_log_to(parser: argparse.ArgumentParser) -> None:
    """Describe the command ``lightning-ft log``."""
    parser.add_argument("where", type=Path, metavar="RUN", help=RUN)
    told = "only events of this kind; may be repeated"
    parser.add_argument("--event", action="append", choices=KINDS, metavar="KIND", help=told)
    parser.set_defaults(run=_log)


def _find(path: Path) -> Path:
    try:
        return find_run(path)
    except FileNotFoundError as error:
        sys.exit(str(error))


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is read of a million events is kept and has no cycles: looking for garbage in it takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _report(arguments: argparse.Namespace) -> None:
    with _no_collection():
        report = Report.of(_find(arguments.where), None if arguments.no_checkpoints else damage)
    sys.stdout.write("".join(f"{line}\n" for line in report.lines()))
    if arguments.html is not None:
        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        arguments.html.write_text(to_html(report), encoding="utf-8")
    if arguments.strict and report.analysis.violations:
        sys.exit(1)


def _log(arguments: argparse.Namespace) -> None:
    for event in EventStream(_find(arguments.where)):
        if not arguments.event or event["event"] in arguments.event:
            del event["process"]
            sys.stdout.write(f"{as_words(event)}\n")
