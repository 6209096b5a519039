"""The real supervisor with real processes; what it decides is tested in test_membership."""

import contextlib
import errno
import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_ft.supervision.processes import become_subreaper
from lightning_ft.supervision.zygote import Zygote

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEADLINE = 180.0
HEADER = """
import os, signal, subprocess, sys, time
forked = "torch" in sys.modules
from imitated_rank import ImitatedRank
"""


class Job:
    """A supervisor, and everything that it and its ranks print."""

    def __init__(
        self,
        zygote: Zygote,
        arguments: list[str],
        stdin: bytes = b"",
        cwd: Path = ROOT,
        terminal: bool = False,
        command: Sequence[str] = ("-m", "lightning_ft.supervision.supervisor"),
    ) -> None:
        reader, writer = pty.openpty() if terminal else os.pipe()
        stdin_reader, stdin_writer = os.pipe()
        os.write(stdin_writer, stdin)
        os.close(stdin_writer)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        self.pid = zygote.spawn([*command, *arguments], env, str(cwd), stdin_reader, writer, writer)
        os.close(writer)
        os.close(stdin_reader)
        self._reader = reader
        self.output = ""
        self.code: int | None = None

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Return what ``pattern`` found once that is ``count`` times."""
        deadline = time.monotonic() + DEADLINE
        while len(found := re.findall(pattern, self.output)) < count:
            assert self._read(deadline), f"{pattern!r} did not come ({count} times) in:\n{self.output}"
        return found

    def finish(self) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def children(self) -> set[int]:
        return {int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()}

    def close(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        os.close(self._reader)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more came in {DEADLINE:g} s after:\n{self.output}"
        try:
            chunk = os.read(self._reader, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # the end of a terminal
                raise
            return False
        self.output += chunk.decode()
        return bool(chunk)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    become_subreaper()
    zygote = Zygote.exec()
    yield zygote
    zygote.close()


Start = Callable[..., Job]


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor over a script, given as text."""
    jobs: list[Job] = []

    def start(script: str, num_slots: int, *arguments: str, stdin: bytes = b"", terminal: bool = False) -> Job:
        path = tmp_path / "train.py"
        path.write_text(HEADER + script)
        options = ["--num-slots", str(num_slots), "--start-method", "fork"]
        jobs.append(Job(zygote, [*options, "--", str(path), *arguments], stdin, terminal=terminal))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


RESPAWN = """
import logging
assert not logging.root.handlers and not logging.getLogger("lightning_ft").handlers, "the supervisor's own set-up"
print("start", forked, sys.argv[1:], os.getcwd(), os.getsid(0) == os.getpid(), flush=True)
rank = ImitatedRank()
rank.send("log", directory=os.path.dirname(__file__))
if rank.slot == 0:
    print("stdin", rank.incarnation, sys.stdin.read())
print("mode", rank.begin())
while True:
    members = rank.next_generation()
    print("members", members)
    if rank.generation["number"] == 1:
        rank.send("progress", step=1)
        if rank.slot == 0:
            print("child", subprocess.Popen(["sleep", "60"]).pid)
            os.kill(os.getpid(), signal.SIGKILL)
    if rank.generation["incarnations"].get(0) == 1:
        break
rank.send("end", call=0)
print("unfinished line", end="")
"""


def test_killed_rank_is_back_at_once_and_the_job_ends_well(start: Start, tmp_path: Path) -> None:
    job = start(RESPAWN, 3, "a b", "--c", stdin=b"typed")
    assert job.finish() == 0
    lines = job.output.splitlines()
    assert re.findall(r"^\[slot 0\] mode (\w+)$", job.output, re.M) == ["start", "join"]
    assert "[slot 1] members [1, 2]" in lines
    assert all(f"[slot {slot}] members [1, 2, 0]" in lines for slot in range(3))
    assert all(lines.count(f"[slot {slot}] unfinished line") == 1 for slot in range(3))
    assert re.findall(r"^\[slot 0\] stdin (.*)$", job.output, re.M) == ["0 typed", "1 "]
    notices = [line for line in lines if line.startswith("[lightning-ft]")]
    assert len(notices) == 1
    assert re.fullmatch(r"\[lightning-ft\] Slot 0 \(pid \d+\) died \(SIGKILL\); respawning \(1 of 3\)\.", notices[0])
    starts = re.findall(r"start (\w+) (.*)", job.output)
    assert len(starts) == 4
    assert set(starts) == {("True", f"['a b', '--c'] {ROOT} True")}, "forked"
    events = [json.loads(line) for line in (tmp_path / "supervisor.jsonl").read_text().splitlines()]
    assert [event["members"] for event in events if event["event"] == "generation"] == [[0, 1, 2], [1, 2], [1, 2, 0]]
    assert events[-1]["event"] == "finish"
    (child,) = re.findall(r"child (\d+)", job.output)
    assert not os.path.exists(f"/proc/{child}"), "what a dead rank left behind lives on"


@pytest.mark.parametrize(
    ("script", "code", "shown"),
    [
        ("rank = ImitatedRank(); rank.begin(); rank.raise_error(ValueError('no'))", 1, "Traceback of ValueError: no"),
        ("if ImitatedRank().slot: sys.exit(7)\nsignal.pause()", 7, "ended before the first step (exit code 7)"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("rank = ImitatedRank(); import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "rank = ImitatedRank(max_restarts=0); rank.begin(); rank.next_generation()\n"
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "All ranks are gone",
        ),
        ("print('done')", 0, "done"),
    ],
)
def test_exit_code_is_that_of_the_first_cause(start: Start, script: str, code: int, shown: str) -> None:
    job = start(script, 3)
    assert job.finish() == code, job.output
    assert job.output.count(shown) == (3 if code == 0 else 1), job.output


def test_slot_that_keeps_dying_stays_out_and_the_others_finish(start: Start) -> None:
    job = start(
        """
rank = ImitatedRank(max_restarts=1)
rank.begin()
for _ in range(4):
    print("members", rank.next_generation())
    rank.send("progress", step=1)
    if rank.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
rank.send("end", call=0)
""",
        2,
    )
    assert job.finish() == 0
    assert re.findall(r"^\[slot 0\] members (.*)$", job.output, re.M) == ["[0, 1]", "[0]", "[0, 1]", "[0]"]
    assert re.findall(r"died \(SIGKILL\); (.*)", job.output) == [
        "respawning (1 of 1).",
        "it stays out after 1 respawn.",
    ]


SPARES = """
directory = os.path.dirname(__file__)
def is_first(name):
    try:
        return not os.close(os.open(os.path.join(directory, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
rank = ImitatedRank(spares=1, max_restarts=1)
is_spare = rank.slot < 0
if is_spare and is_first("raises"):
    from lightning_ft.supervision.last_words import report_uncaught
    report_uncaught()
    raise ValueError("not this one")
if is_spare and is_first("dies while it waits"):
    rank.send("park", call=0)
    os.kill(os.getpid(), signal.SIGKILL)
if is_spare:
    print("a spare waits", subprocess.Popen(["sleep", "60"]).pid)
rank.send("log", directory=directory)
for call, fn in enumerate(["fit", "validate", "fit"]):
    mode = rank.begin(call, fn)
    if is_spare:
        print(fn, mode)
    if mode == "skip":
        continue
    while True:
        members = rank.next_generation()
        rank.send("progress", step=1)
        if rank.generation["number"] == 1:
            while not os.path.exists(os.path.join(directory, "go")):
                time.sleep(0.01)
        if call == 2 and len(members) == 2 and rank.generation["incarnations"][1] == 0 and rank.slot == 1:
            print("dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if call < 2 or rank.generation["incarnations"].get(1) == 1:
            break
    rank.send("end", call=call)
print("done", os.getpid(), is_spare)
"""


def test_spare_follows_the_calls_and_takes_the_place_of_the_dead(start: Start, tmp_path: Path) -> None:
    job = start(SPARES, 2)
    job.wait_for(r"\[spare\] a spare waits \d+\n")
    (tmp_path / "go").touch()
    assert job.finish() == 0, job.output
    assert job.output.count("A spare raised ValueError: not this one.") == 1
    assert "Traceback" not in job.output
    modes = re.findall(r"^\[(spare|slot 1)\] (\w+) (skip|join)$", job.output, re.M)
    assert modes[:3] == [("spare", "fit", "skip"), ("spare", "validate", "skip"), ("slot 1", "fit", "join")]
    assert len(re.findall(r"^\[slot \d\] done \d+ False$", job.output, re.M)) == 1
    (pid,) = re.findall(r"^\[slot 1\] done (\d+) True$", job.output, re.M)
    events = [json.loads(line) for line in (tmp_path / "supervisor.jsonl").read_text().splitlines()]
    assert [event["pid"] for event in events if event["event"] == "spawn"][2:] == [int(pid)]
    codes = [event["code"] for event in events if event["event"] == "spare_exit"]
    assert codes == [1, -signal.SIGKILL]
    assert "respawning (1 of 1)" in job.output
    for child in re.findall(r"a spare waits (\d+)$", job.output, re.M):
        stat = Path(f"/proc/{child}/stat")
        assert not stat.exists() or stat.read_text().split()[2] in "ZX", "what a spare started lives on"


def test_nothing_of_the_supervisor_is_on_a_network(start: Start) -> None:
    job = start("ImitatedRank().begin(); print('up'); signal.pause()", 1)
    job.wait_for("up")
    held = {descriptor.resolve().name for descriptor in Path(f"/proc/{job.pid}/fd").iterdir()}
    tables = [Path(f"/proc/{job.pid}/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")]
    assert any(name.startswith("socket:[") for name in held)
    assert not held & {f"socket:[{row.split()[9]}]" for table in tables for row in table.splitlines()[1:]}


def test_death_of_the_supervisor_leaves_no_process(start: Start) -> None:
    job = start("ImitatedRank().begin(); print('up'); signal.pause()", 3)
    job.wait_for("up", 3)
    descriptors = [os.pidfd_open(pid) for pid in job.children()]
    os.kill(job.pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE
    try:
        for descriptor in descriptors:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "a process outlived the supervisor"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_bug_of_the_supervisor_ends_the_job_with_its_traceback(zygote: Zygote, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEADER + "open(f'{__file__}.{os.getpid()}', 'w').close(); ImitatedRank().begin(); signal.pause()")
    code = f"""
import sys
from lightning_ft.supervision import supervisor
perform = supervisor.Supervisor._perform
def broken(self, action):
    perform(self, action)
    if isinstance(action, supervisor.Send):
        raise KeyError("a bug")
supervisor.Supervisor._perform = broken
sys.exit(supervisor.main(["--num-slots", "3", "--start-method", "fork", "--", {str(path)!r}]))
"""
    job = Job(zygote, [], command=["-c", code])
    assert job.finish() == 1
    assert job.output.count("KeyError: 'a bug'") == 1
    pids = [int(file.suffix[1:]) for file in tmp_path.glob("train.py.*")]
    assert len(pids) == 3
    deadline = time.monotonic() + DEADLINE
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            assert ready, "a rank outlived the supervisor"
    job.close()


def test_termination_reaches_every_rank_once_and_ends_the_job_with_143(start: Start) -> None:
    job = start(
        """
def leave(*_):
    print("asked to leave")
    sys.exit(143 if rank.slot else 0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, lambda *_: print("asked for news"))
rank = ImitatedRank()
rank.begin()
rank.next_generation()
rank.send("progress", step=1)
print("up")
while True:
    signal.pause()
""",
        3,
    )
    job.wait_for("up", 3)
    os.kill(job.pid, signal.SIGUSR1)
    job.wait_for("asked for news", 3)
    os.kill(job.pid, signal.SIGTERM)
    assert job.finish() == 143
    assert job.output.count("asked to leave") == 3
    assert "respawning" not in job.output


def test_lines_of_ranks_that_write_at_once_stay_whole(start: Start) -> None:
    job = start(
        """
slot = int(os.environ["LIGHTNING_FT_SLOT"])
for number in range(500):
    line = f"<{slot}:{number}:{'x' * 300}>"
    for part in (line[:100], line[100:] + "\\n"):
        os.write(1 + number % 2, part.encode())
""",
        3,
    )
    assert job.finish() == 0
    expected = [f"[slot {slot}] <{slot}:{number}:{'x' * 300}>" for slot in range(3) for number in range(500)]
    assert sorted(job.output.splitlines()) == sorted(expected)


def test_leader_draws_its_bar_on_the_terminal(start: Start) -> None:
    job = start(
        """
rank = ImitatedRank()
rank.begin()
if rank.slot == 1:
    print("a line")
rank.next_generation()
if rank.slot == 0:
    print("\\r 10%", end="", flush=True)
    rank.send("exclude", slots=[1], reason="done")
    rank.next_generation()
    print("\\r 20%", sys.stdout.isatty(), sys.stderr.isatty())
else:
    signal.pause()
""",
        2,
        terminal=True,
    )
    assert job.finish() == 0
    assert "\r 20% True True\r\n" in job.output
    assert "[slot 1] a line\r\n" in job.output
    assert "[slot 0]" not in job.output


def test_rank_starts_from_nothing_once_the_zygote_is_gone(start: Start) -> None:
    job = start(
        """
rank = ImitatedRank()
rank.begin()
while 1:
    members = rank.next_generation()
    print("up", os.getpid(), forked, members)
    rank.send("progress", step=1)
    if rank.generation["incarnations"].get(1) == 1:
        break
rank.send("end", call=0)
""",
        2,
    )
    pids = {slot: int(pid) for slot, pid in job.wait_for(r"\[slot (\d)\] up (\d+) True", 2)}
    (zygote_pid,) = job.children() - set(pids.values())
    os.kill(zygote_pid, signal.SIGKILL)
    job.wait_for("Respawns take longer from now on")
    os.kill(pids["1"], signal.SIGKILL)
    assert job.finish() == 0
    assert re.search(r"\[slot 1\] up \d+ False \[0, 1\]", job.output)


def test_program_may_be_a_module_or_code(zygote: Zygote, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv, sys.path[0])")
    job = Job(zygote, ["--num-slots", "2", "--", "-m", "pkg.train", "x y"], cwd=tmp_path)
    assert job.finish() == 0
    expected = f"__main__ pkg {[str(package / 'train.py'), 'x y']} {tmp_path}"
    assert sorted(job.output.splitlines()) == [f"[slot {slot}] {expected}" for slot in range(2)]
    job.close()
    code = "import sys; print(__name__, sys.argv, sys.path[:1])"
    job = Job(zygote, ["--num-slots", "2", "--", "-c", code, "-m", "x"])
    assert job.finish() == 0
    expected = "__main__ ['-c', '-m', 'x'] ['']"
    assert sorted(job.output.splitlines()) == [f"[slot {slot}] {expected}" for slot in range(2)]
    job.close()
