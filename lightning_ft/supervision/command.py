"""The command line of a job: split into the interpreter's flags and the program, and turned into the supervisor's.

Imported by the launcher, hence free of everything that the supervisor itself needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_ft.elastic.options import StartMethod

SUPERVISOR_MODULE = "lightning_ft.supervision.supervisor"

_FLAGS_WITH_ARGUMENT = "WX"
_LONG_FLAGS_WITH_ARGUMENT = ("--check-hash-based-pycs",)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# Where the command line was typed, as near as an import can know: Hydra and others change the directory before fit,
# and a relative script path would then lead nowhere.
_started_in = _directory()


def start_here() -> None:
    """Note that the command of this process, which was forked with this module imported, begins in this directory."""
    global _started_in
    _started_in = _directory()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``sys.orig_argv`` into interpreter flags and program.

    Args:
        argv: A Python command line, the interpreter first.

    Returns:
        The flags, and ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["-c", "code", ...]``; an empty program
        for an interactive interpreter.

    """
    flags: list[str] = []
    rest = list(argv[1:])
    while rest:
        word = rest[0]
        if word in _LONG_FLAGS_WITH_ARGUMENT:
            flags += rest[:2]
            del rest[:2]
            continue
        if not word.startswith("-") or word == "-":
            return flags, rest
        del rest[0]
        if word.startswith("--"):
            flags.append(word)
            continue
        for position, letter in enumerate(word[1:], start=1):
            if letter in "mc":
                if position > 1:
                    flags.append(word[:position])
                attached = word[position + 1 :]
                return flags, [f"-{letter}", *([attached] if attached else []), *rest]
            if letter in _FLAGS_WITH_ARGUMENT:
                flags.append(word)
                if position == len(word) - 1 and rest:
                    flags.append(rest.pop(0))
                break
        else:
            flags.append(word)
    return flags, []


def supervisor_command(
    num_slots: int,
    program: Sequence[str] | None = None,
    *,
    more_arguments: Sequence[str] = (),
    start_method: StartMethod = "auto",
) -> list[str]:
    """Return the argv that makes this process the supervisor of ``num_slots`` ranks.

    Args:
        num_slots: How many ranks to start.
        program: What the ranks run; None: what this process runs.
        more_arguments: What the program gets besides its own arguments.
        start_method: See :class:`~lightning_ft.elastic.options.SupervisionOptions`.

    Raises:
        ValueError: If this process runs no program that could be run again.

    """
    flags, own = split(sys.orig_argv)
    if program is None:
        program = own
    if not program or program[0] == "-":
        raise ValueError(
            "An interactive interpreter cannot be started again for each rank. "
            "Put the code into a file and use `lightning-ft run -n N file.py`."
        )
    arguments = ["--num-slots", str(num_slots)]
    if start_method != "auto":
        arguments += ["--start-method", start_method]
    if _started_in is not None and _started_in != _directory():
        arguments += ["--directory", _started_in]
    if "OMP_NUM_THREADS" not in os.environ:
        arguments.append("--ranks-choose-threads")
    return [sys.executable, *flags, "-m", SUPERVISOR_MODULE, *arguments, "--", *program, *more_arguments]


def exec_supervisor(
    num_slots: int,
    program: Sequence[str] | None = None,
    *,
    more_arguments: Sequence[str] = (),
    start_method: StartMethod = "auto",
) -> NoReturn:
    """Become the supervisor: same process id, same terminal, none of the memory; see :func:`supervisor_command`."""
    command = supervisor_command(num_slots, program, more_arguments=more_arguments, start_method=start_method)
    # Read when torch and numpy are loaded, which the new interpreter does before it runs a line of ours: it forks, and
    # must not start threads first. One for OpenBLAS even where the user asks OpenMP for more: it starts them at import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(command[0], command)
