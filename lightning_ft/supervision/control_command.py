"""The command ``lightning-ft ctl``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_ft.events.history import find_run
from lightning_ft.supervision.control import ask
from lightning_ft.supervision.requests import FAULTS


def add_to(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.add_argument("where", type=Path, metavar="RUN", help="event directory of a running job, or one that it is in")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    commands.add_parser("status", help="tell what each slot does")
    for name, told in (
        ("suspend", "end the process of a slot, and start none until `resume`"),
        ("resume", "start a suspended slot again"),
        ("exclude", "end the process of a slot that is not to be trusted; it is started again as after a death"),
    ):
        commands.add_parser(name, help=told).add_argument("slot", type=int, metavar="SLOT")
    fault = commands.add_parser("fault", help="a drill: let something happen to a slot")
    fault.add_argument("kind", choices=list(FAULTS), metavar="KIND", help=", ".join(FAULTS))
    fault.add_argument("slot", type=int, metavar="SLOT")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    slot, kind = getattr(arguments, "slot", None), getattr(arguments, "kind", None)
    try:
        reply = ask(find_run(arguments.where), arguments.command, slot, kind)
    except OSError as error:
        sys.exit(str(error))
    if not reply["accepted"]:
        sys.exit(f"Refused: {reply['answer']}.")
    if "status" in reply:
        sys.stdout.write(_tell(reply["status"]))


def _tell(status: dict[str, Any]) -> str:
    lines = [f"{status['fn'] or 'no call'}, step {status['step']} or a little later, generation {status['generation']}"]
    for row in status["slots"]:
        more = [f"{name} {row[name]}" for name in ("rank", "pid", "incarnation") if name in row]
        lines.append(f"  slot {row['slot']}: {', '.join([row['state'], *more])}")
    return "".join(f"{line}\n" for line in lines)
