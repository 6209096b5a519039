"""The command ``lightning-ft``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, get_args

from lightning_ft.checkpoint import commands as checkpoint_commands
from lightning_ft.dump import commands as dump_commands
from lightning_ft.elastic.options import StartMethod
from lightning_ft.events import commands as event_commands
from lightning_ft.events import proof
from lightning_ft.supervision import control_command
from lightning_ft.supervision.command import exec_supervisor
from lightning_ft.supervision.other_launchers import other_launcher


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one of the subcommands."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="lightning-ft", description="Fault tolerance for PyTorch Lightning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="start a training script with several ranks that may die"))
    checkpoint_commands.add_to(commands.add_parser("ckpt", help="list, verify, export or remove checkpoints"))
    dump_commands.add_to(commands.add_parser("dump", help="list, show or compare what TensorDump wrote"))
    event_commands.add_report_to(commands.add_parser("report", help="tell what happened in a run, and what is wrong in it"))
    event_commands.add_log_to(commands.add_parser("log", help="print the events of a run as lines of key=value words"))
    control_command.add_to(commands.add_parser("ctl", help="ask a running job for something"))
    proof.add_to(commands.add_parser("data", help="tell which batches were trained, by whom, which twice and which never"))
    words, program = _split_program(words) if words[:1] == ["run"] else (words, [])
    arguments = parser.parse_args(words, argparse.Namespace(program=program))
    arguments.run(arguments)
    sys.exit(0)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lightning-ft run -n N [--start-method METHOD] [--] (train.py | -m MODULE | -c CODE) ..."
    parser.add_argument("-n", "--num-slots", type=_positive, required=True, metavar="N", help="how many ranks to start")
    parser.add_argument("--start-method", choices=get_args(StartMethod), default="auto", help="how ranks are started")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _split_program(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of ``run`` into our options and the program, whose ``-m`` argparse would take for one of ours."""
    position = 1
    while position < len(words) and words[position] != "--":
        if words[position] in ("-n", "--num-slots", "--start-method"):
            position += 2
        elif words[position].startswith(("-n", "--num-slots=", "--start-method=", "-h", "--help")):
            position += 1
        else:
            return words[:position], words[position:]
    return words[:position], words[position + 1 :]


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    program: list[str] = arguments.program
    if not program or (program[0] in ("-m", "-c") and len(program) == 1):
        parser.error("nothing to run: expected train.py, -m MODULE or -c CODE")
    if (obstacle := other_launcher(os.environ)) is not None:
        parser.error(obstacle)
    if program[0] not in ("-m", "-c") and not os.path.exists(program[0]):
        parser.error(f"nothing to run: {program[0]} does not exist; expected train.py, -m MODULE or -c CODE")
    exec_supervisor(arguments.num_slots, program, start_method=arguments.start_method)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer, 1 or more, not {text}")
    return int(text)


if __name__ == "__main__":
    main()
