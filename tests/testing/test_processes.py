"""Processes that tests start."""

from pathlib import Path

from lightning_ft.testing import run_without_supervisor

SCRIPT = """
import atexit, threading
from lightning_ft.testing import end_process

class Lasting:
    def __del__(self):
        print("freed", flush=True)

lasting = Lasting()

def work():
    threading.main_thread().join(60.0)  # until that waits for this one
    print("thread")

def tell():
    print("exit function", end="")  # in a buffer until it is flushed

threading.Thread(target=work).start()
atexit.register(tell)
end_process(3)
print("never")
"""


def test_a_process_ends_at_once_but_for_its_threads_exit_functions_and_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = run_without_supervisor(script, num_ranks=1, directory=tmp_path)
    assert (job.returncode, job.stdout) == (3, "thread\nexit function"), job.tail()
