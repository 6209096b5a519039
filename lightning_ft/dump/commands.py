"""The commands ``lightning-ft dump ls | show | diff``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from lightning_ft.dump.diff import compare
from lightning_ft.dump.index import NO_BATCH, Entry
from lightning_ft.dump.page import Histograms, write_page
from lightning_ft.dump.reader import FoundAttempt, find_attempts, read_records
from lightning_ft.dump.report import describe, table
from lightning_ft.errors import DumpError


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``lightning-ft dump``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("ls", help="list the attempts of rollouts, and which of them are whole")
    listing.add_argument("path", help="a directory that dumps lie in, at any depth")
    listing.add_argument("--verify", action="store_true", help="check every byte; exit code 1 if anything is damaged")
    listing.set_defaults(run=lambda arguments: _or_exit(lambda: _list(arguments.path, arguments.verify)))

    showing = commands.add_parser("show", help="show values that were dumped")
    showing.add_argument("path", help="a directory that dumps lie in, at any depth")
    showing.add_argument("name", help="a pattern of names, such as 'output:encoder.*'")
    showing.add_argument("--step", type=int, help="of this step only")
    showing.add_argument("--limit", type=int, default=20, help="how many at most (default: 20)")
    showing.set_defaults(run=lambda arguments: _or_exit(lambda: _show(arguments)))

    diffing = commands.add_parser(
        "diff", help="compare two dumps: exit code 0 if they are equal, 1 if not, 2 if they can't be compared"
    )
    diffing.add_argument("first", help="a directory that dumps lie in")
    diffing.add_argument("second", help="another one of the same level: of a role, phase, rollout or attempt, or above")
    diffing.add_argument("--rtol", type=_tolerance, default=0.0, help="relative tolerance (default: 0)")
    diffing.add_argument("--atol", type=_tolerance, default=0.0, help="absolute tolerance (default: 0)")
    diffing.add_argument("--only", default="*", metavar="NAME", help="a pattern of the names that are compared")
    diffing.add_argument("--limit", type=int, default=20, help="how many lines lists have at most (default: 20)")
    diffing.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    diffing.set_defaults(run=lambda arguments: _or_exit(lambda: _diff(arguments)))


def _list(path: str, verify: bool) -> None:
    rows: list[tuple[str, ...]] = [("ROLE", "PHASE", "ROLLOUT", "ATTEMPT", "RANKS", "STEPS", "TENSORS", "MB", "BEGAN", "")]
    num_damaged = 0
    for found in find_attempts(path):
        attempt = found.attempt
        began = datetime.fromtimestamp(attempt.created).isoformat(" ", "seconds")
        names = (attempt.role, attempt.phase, str(attempt.rollout), str(found.number), str(attempt.num_parts))
        state = _state(found, verify)
        num_damaged += state.startswith("damaged")
        rows.append((*names, *_amounts(found), began, state))
    print("\n".join(table(rows)))
    if num_damaged:
        sys.exit(1)


def _state(found: FoundAttempt, verify: bool) -> str:
    if not found.is_complete:
        return "not whole"
    try:
        entries = found.entries()
        if verify:
            found.verify()
    except DumpError as error:
        return f"damaged: {error.reason}"
    without = sorted({entry.step for entry in entries if entry.name == NO_BATCH})
    return f"no batch of this replica in step {', '.join(map(str, without))}" if without else ""


def _amounts(found: FoundAttempt) -> tuple[str, str, str]:
    markers = [marker for marker in found.markers if marker is not None]
    steps = [marker.steps for marker in markers if marker.steps is not None]
    first_to_last = f"{min(first for first, _ in steps)}-{max(last for _, last in steps)}" if steps else ""
    size = sum(marker.tensors_size for marker in markers)
    return first_to_last, str(sum(marker.num_entries for marker in markers)), f"{size / 1e6:.1f}"


def _show(arguments: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = [("NAME", "WHERE", "STEP", "BATCH", "RANK", "SHAPE", "DTYPE", "MIN", "MAX", "MEAN", "NAN")]
    num_left_out = 0
    found = {key: record for key, record in read_records(arguments.path).items() if fnmatchcase(key.name, arguments.name)}
    if not found:
        raise DumpError(arguments.path, f"nothing in it is called `{arguments.name}`")
    steps = sorted({key.step for key in found})
    if arguments.step not in (None, *steps):
        known = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        raise DumpError(arguments.path, f"`{arguments.name}` is in {known}, not in step {arguments.step}")
    for key, record in found.items():
        if arguments.step not in (None, key.step):
            continue
        for entry in record.entries:
            if len(rows) > arguments.limit:
                num_left_out += 1
                continue
            name = key.name + (f" call {key.call}" if key.call else "")
            rows.append((name, key.where, str(key.step), str(key.micro_batch), *_values(record.found, entry)))
    print("\n".join(table(rows)) + (f"\n... and {num_left_out} more" if num_left_out else ""))


def _values(found: FoundAttempt, entry: Entry) -> tuple[str, ...]:
    tensor = found.load(entry)
    numbers = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64)
    known = numbers[~numbers.isnan()]
    values = (known.min(), known.max(), known.mean()) if known.numel() else ()
    shape = str(list(entry.shape)).replace(" ", "")
    num_nan = str(int(numbers.isnan().sum()))
    cells = [f"{float(value):.6g}" for value in values] or ["", "", ""]
    return (str(entry.rank), shape, entry.dtype, *cells, num_nan)


def _diff(arguments: argparse.Namespace) -> None:
    histograms = Histograms()
    if arguments.html and not Path(arguments.html).parent.is_dir():  # told before the work, which may take long
        raise NotADirectoryError(
            f"`--html {arguments.html}` can't be written: {Path(arguments.html).parent} is no directory."
        )
    comparison = compare(
        arguments.first,
        arguments.second,
        rtol=arguments.rtol,
        atol=arguments.atol,
        only=lambda name: fnmatchcase(name, arguments.only),
        on_different=histograms.add if arguments.html else None,
    )
    if arguments.html:
        write_page(arguments.html, comparison, histograms)
    print(describe(comparison, limit=arguments.limit))
    if not comparison.is_equal:
        sys.exit(1)


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more: {text}")
    return value


def _or_exit(action: Callable[[], None]) -> None:
    """Do it, or end with code 2 and one line that says why not."""
    try:
        action()
    except (DumpError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
