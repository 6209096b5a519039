"""Runs whole jobs with real processes: scripts under a supervisor, and functions in ranks of their own.

Everything is forked from one server that has imported torch and lightning, so that a job starts within a second.
Linux only. The calling process becomes the parent of what its jobs leave behind, and ends it.
"""

import inspect
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_ft.events.log import Events, read_events
from lightning_ft.testing.fault_plan import ENVIRONMENT_VARIABLE, FaultPlan
from lightning_ft.testing.processes import Process, fork_server

_TAIL = 12000  # characters of output in an error
_TIME_TO_SAY_WHERE = 2.0


@dataclass(frozen=True)
class JobResult:
    """How a job ended and what it left.

    Args:
        returncode: Exit code of the supervisor; ``-signum`` if a signal ended it.
        stdout: What the job wrote there.
        stderr: What the job wrote there.
        duration: Seconds from its start to its end.
        events: Of the newest run below ``directory``, those of all ranks and of the supervisor, sorted by time.
        directory: Where it ran.

    """

    returncode: int
    stdout: str
    stderr: str
    duration: float
    events: Events
    directory: Path

    def check(self) -> "JobResult":
        """Return this result if the job ended well.

        Raises:
            AssertionError: With the end of its output.

        """
        assert self.returncode == 0, f"The job ended with code {self.returncode}.\n{self.tail()}"
        return self

    def tail(self) -> str:
        """Return the end of its output."""
        return _tail(self.stdout, self.stderr)


def run_job(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    num_slots: int,
    env: Mapping[str, str] | None = None,
    faults: FaultPlan | None = None,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = 180.0,
) -> JobResult:
    """Run ``script`` with several ranks, as ``lightning-ft run`` does.

    Args:
        script: The training script; ``["-m", "module"]`` is not supported here.
        args: Its arguments.
        num_slots: How many ranks to start.
        env: Environment variables to add.
        faults: What is to go wrong; the script gets it from :meth:`FaultPlan.from_environ`. Without a directory of its
            own it gets one below ``directory``.
        directory: Where it runs; the current directory by default.
        timeout: Seconds after which all its processes are killed.

    Returns:
        How it ended; a return code other than 0 is no error here, see :meth:`JobResult.check`.

    Raises:
        TimeoutError: If it ran too long, with the end of its output.

    """
    place = Path(directory or Path.cwd()).absolute()
    variables = dict(env or {})
    if faults is not None:
        if faults.directory is None:
            faults.directory = str(_new_directory(place, "faults"))
        variables[ENVIRONMENT_VARIABLE] = faults.to_json()
    program = [os.fspath(Path(script).absolute()), *args]
    supervisor = ["-m", "lightning_ft.supervision.supervisor", "--num-slots", str(num_slots), "--", *program]
    started = time.monotonic()
    known = _runs(place)
    ((code, stdout, stderr),) = _run_processes([supervisor], [variables], place, timeout)
    return JobResult(code, stdout, stderr, time.monotonic() - started, _read_new_events(place, known), place)


def run_without_supervisor(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = 180.0,
) -> JobResult:
    """Run ``script`` in ``num_ranks`` processes, as ``torchrun`` does: for comparisons with Lightning's own strategies.

    Args:
        script: The training script.
        args: Its arguments.
        num_ranks: How many ranks to start.
        env: Environment variables to add.
        directory: Where it runs; the current directory by default.
        timeout: Seconds after which all its processes are killed.

    Returns:
        How it ended: the first return code that is not 0, and the output of all ranks.

    Raises:
        TimeoutError: If it ran too long, with the end of its output.

    """
    place = Path(directory or Path.cwd()).absolute()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"}
    shared |= {"LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "none", **(env or {})}
    variables = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    program = [os.fspath(Path(script).absolute()), *args]
    started = time.monotonic()
    ended = _run_processes([program] * num_ranks, variables, place, timeout)
    code = next((code for code, _, _ in ended if code != 0), 0)
    stdout, stderr = "".join(stdout for _, stdout, _ in ended), "".join(stderr for _, _, stderr in ended)
    return JobResult(code, stdout, stderr, time.monotonic() - started, Events(), place)


def run_ranks(
    target: Callable[..., Any],
    num_ranks: int,
    *,
    args: Sequence[Any] = (),
    max_restarts: int = 0,
    shard_size: int | Literal["all"] = 1,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = 180.0,
) -> list[Any]:
    """Call ``target(engine, *args)`` in several ranks, each with a started engine.

    Args:
        target: A function of a module's top level; the ranks import its file. In a rank that was started again
            ``engine.alone`` is true, and the function begins with ``engine.join()`` and ``engine.enter()``.
        num_ranks: How many.
        args: JSON data.
        max_restarts: How often a slot is started again.
        shard_size: How many ranks are a replica together.
        directory: Where the ranks run and write their events, in ``events``; a temporary one by default.
        timeout: Seconds after which all processes are killed; also the bound of the engine's own waits.

    Returns:
        What ``target`` returned, as JSON data, by slot; None for a slot that did not get so far.

    Raises:
        AssertionError: If the job did not end with code 0, with the end of its output.
        TimeoutError: If it ran too long, with the end of its output.

    """
    if directory is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run_ranks(
                target,
                num_ranks,
                args=args,
                max_restarts=max_restarts,
                shard_size=shard_size,
                directory=temporary,
                timeout=timeout,
            )
    place = _new_directory(Path(directory), "ranks")
    request = {
        "file": inspect.getfile(target),
        "function": target.__qualname__,
        "args": list(args),
        "max_restarts": max_restarts,
        "shard_size": shard_size,
        "timeout": timeout,
        "directory": str(place),
    }
    program = ["-m", "lightning_ft.testing.rank", json.dumps(request)]
    supervisor = ["-m", "lightning_ft.supervision.supervisor", "--num-slots", str(num_ranks), "--", *program]
    ((code, stdout, stderr),) = _run_processes([supervisor], [{}], Path(directory), timeout)
    assert code == 0, f"The ranks ended with code {code}.\n{_tail(stdout, stderr)}"
    paths = [place / f"result_{slot}.json" for slot in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def read_newest_run(directory: str | os.PathLike[str]) -> Events:
    """Return the events of the newest run of FTStrategy whose logs are below ``directory``; empty if there is none."""
    return _read_new_events(Path(directory), set())


def _run_processes(
    commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]], place: Path, timeout: float
) -> list[tuple[int, str, str]]:
    """Run commands side by side; return how each ended and what it wrote."""
    server = fork_server()  # whose own start is not counted
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [(Path(temporary, f"{n}.out"), Path(temporary, f"{n}.err")) for n in range(len(commands))]
        processes = [
            server.start(command, {**_environ(), **more}, place, *paths)
            for command, more, paths in zip(commands, variables, outputs, strict=True)
        ]
        codes = _wait(processes, deadline)
        texts = [(out.read_text(errors="replace"), err.read_text(errors="replace")) for out, err in outputs]
    if codes is None:
        output = "".join(stdout for stdout, _ in texts), "".join(stderr for _, stderr in texts)
        raise TimeoutError(f"`{' '.join(commands[0])}` did not end within {timeout:g} s.\n{_tail(*output)}")
    return [(code, *text) for code, text in zip(codes, texts, strict=True)]


def _wait(processes: Sequence[Process], deadline: float) -> list[int] | None:
    """Return the exit codes, or None if they did not all end in time; nothing is left of them either way."""
    try:
        codes = [process.wait(deadline - time.monotonic()) for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code is None:
                process.abort_tree(_TIME_TO_SAY_WHERE)
    finally:
        for process in processes:
            process.kill_tree()
    return None if None in codes else [code for code in codes if code is not None]


def _environ() -> dict[str, str]:
    """This process's environment, without what would tell a job that it is part of something else."""
    foreign = ("LIGHTNING_FT_", "PYTEST_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ}


def _tail(stdout: str, stderr: str) -> str:
    return "\n".join(f"--- {name}:\n{text[-_TAIL:]}" for name, text in (("stdout", stdout), ("stderr", stderr)) if text)


def _new_directory(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=parent))


def _runs(directory: Path) -> set[Path]:
    """The directories that hold a run's events; a run has several if its logs went to several places."""
    return {path.parent for path in directory.rglob("ft_events/*/*.jsonl")}


def _read_new_events(directory: Path, known: set[Path]) -> Events:
    runs = _runs(directory) - known
    if not runs:
        return Events()
    newest = max(runs, key=lambda run: max(path.stat().st_mtime_ns for path in run.iterdir())).name
    parts = [read_events(run) for run in runs if run.name == newest]
    merged = sorted((event for part in parts for event in part), key=lambda event: float(event["t"]))
    return Events(merged, sum(part.num_torn for part in parts))
