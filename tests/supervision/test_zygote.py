"""The fork server by itself: what a process that it starts finds, and how it ends."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_ft.supervision.processes import become_subreaper, num_threads
from lightning_ft.supervision.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    become_subreaper()
    zygote = Zygote.exec()
    yield zygote
    zygote.close()
    zygote.close()


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(zygote: Zygote, tmp_path: Path) -> Run:
    """Run a command to its end; return its exit code and all that it printed."""

    def run(*command: str, stdin: str = "", env: dict[str, str] | None = None) -> tuple[int, str]:
        typed, printed = tmp_path / "typed", tmp_path / "printed"
        typed.write_text(stdin)
        with typed.open() as source, printed.open("w") as target:
            streams = (source.fileno(), target.fileno(), target.fileno())
            pid = zygote.spawn(command, {**os.environ, **(env or {})}, str(tmp_path), *streams)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), printed.read_text()

    return run


def test_started_process_finds_what_an_interpreter_would_give_it(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text("""
import os, signal, sys, torch
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert __file__ == os.path.abspath(sys.argv[0]), __file__
assert sys.argv[1:] == ["a b", "-x"], sys.argv
assert sys.orig_argv[-3:] == sys.argv, sys.orig_argv
assert sys.path[0] == os.path.dirname(__file__), sys.path
assert sys.path[1] == "/from/python/path", sys.path
assert os.environ["ONLY_HERE"] == "1"
assert sys.stdin.read() == "typed"
assert os.getsid(0) == os.getpid()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
assert sorted(map(int, os.listdir("/proc/self/fd")))[:4] == [0, 1, 2, 3]  # 3 is the listing itself
assert len(os.listdir("/proc/self/fd")) == 4
print("on stdout")
print("on stderr", file=sys.stderr)
""")
    env = {"ONLY_HERE": "1", "PYTHONPATH": "/from/python/path"}
    assert run("sub/train.py", "a b", "-x", stdin="typed", env=env) == (0, "on stdout\non stderr\n")


@pytest.mark.parametrize(
    ("code", "expected", "printed"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('too bad')", 1, "too bad\n"),
        ("1 / 0", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nZeroDivisionError: '),
        ("no code", 1, '  File "<string>", line 1\n'),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130, "Traceback (most recent call last):\n"),
    ],
)
def test_exit_is_that_of_an_interpreter(run: Run, code: str, expected: int, printed: str) -> None:
    actual, output = run("-c", code)
    assert (actual, output[: len(printed)]) == (expected, printed)
    assert printed or not output


def test_exit_runs_what_an_interpreter_runs(run: Run) -> None:
    code = """
import atexit, sys, threading
late = threading.Event()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (late.wait(), print("thread"))).start()
threading.Timer(0.01, late.set).start()
sys.stdout.write("main ")
"""
    assert run("-c", code) == (0, "main thread\natexit\n")


def test_module_and_directory_run_as_main(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; from . import other; print(__spec__.name, sys.argv[1:])")
    (package / "other.py").write_text("print(__name__)")
    assert run("-m", "pkg", "-n") == (0, "pkg.other\npkg.__main__ ['-n']\n")
    assert run("-m", "pkg.missing")[0] == 1
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys, neighbour; print(__name__, sys.argv)")
    (folder / "neighbour.py").touch()
    assert run("folder", "x") == (0, "__main__ ['folder', 'x']\n")


def test_two_started_processes_draw_different_random_numbers(run: Run) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first, second = (run("-c", code)[1].split() for _ in range(2))
    assert len(first) == 3
    assert not set(first) & set(second)


def test_objects_of_main_can_be_sent_to_a_spawned_process(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import multiprocessing, os
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
""")
    assert run("train.py") == (0, "[2, 4]\n")


def test_started_processes_end_with_the_one_that_asked_for_them(tmp_path: Path) -> None:
    code = f"""
import os, signal
from lightning_ft.supervision.processes import become_subreaper
from lightning_ft.supervision.zygote import Zygote
become_subreaper()
zygote = Zygote.fork_here()
pid = zygote.spawn(["-c", "import signal; signal.pause()"], os.environ, {str(tmp_path)!r}, 0, 1, 2)
print(zygote.pid, pid, flush=True)
signal.pause()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None
    descriptors = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 30.0)[0], "a process outlived the one that it belongs to"
        os.close(descriptor)
    assert len(descriptors) == 2


def test_request_to_a_dead_server_is_an_error_and_not_a_hang() -> None:
    zygote = Zygote.exec()
    os.kill(zygote.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError, match=f"pid {zygote.pid}.* is gone"):
        zygote.spawn(["-c", ""], {}, "/", 0, 1, 2)
    zygote.close()


def test_server_that_is_let_go_while_it_starts_a_process_ends_without_a_word() -> None:
    code = """
import os
from lightning_ft.supervision.processes import become_subreaper
from lightning_ft.supervision.zygote import Zygote
become_subreaper()
zygote = Zygote.fork_here()
null = os.open(os.devnull, os.O_RDWR)
zygote.request(["-c", "pass"], dict(os.environ), ".", (null, null, null))
zygote.close()
print("started:", os.wait()[1])
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "started: 0\n", "")


def test_news_of_a_start_that_is_taken_early_is_not_waited_for_again() -> None:
    code = """
import os, selectors, socket
from lightning_ft.supervision import starting
from lightning_ft.supervision.processes import become_subreaper
starting.preload = lambda: None
become_subreaper()
starter = starting.Starter(["-c", "pass"], "fork")
selector = selectors.DefaultSelector()
reader, writer = socket.socketpair()
selector.register(reader, selectors.EVENT_READ, starter.settle)  # as when a process ended
starter.watch(selector, lambda pid, key: print("started", key))
zygote = starter._zygote
zygote._socket.settimeout(10.0)
null = os.open(os.devnull, os.O_RDWR)
starter.start((0, 0), dict(os.environ), (null, null, null))
selectors.select.select([zygote], [], [], 10.0)
writer.send(b"x")
ready = [key for key, _ in selector.select(10.0)]
assert len(ready) == 2
for key in sorted(ready, key=lambda key: key.fileobj is zygote):
    key.data()
print("has its zygote:", starter._zygote is zygote)
starter.close()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    finished = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert finished.stdout == "started (0, 0)\nhas its zygote: True\n", finished.stderr


def test_process_with_threads_is_not_forked() -> None:
    assert num_threads() >= 1
    code = """
import threading
from lightning_ft.supervision.zygote import Zygote
threading.Thread(target=threading.Event().wait, daemon=True).start()
Zygote.fork_here()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "RuntimeError: `Zygote.fork_here()` was called in a process with 2 threads: expected one." in result.stderr
