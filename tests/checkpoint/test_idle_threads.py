import gc
import os
import threading
import weakref

import pytest

from lightning_ft.checkpoint.idle_threads import IdleThreads

NAME = "threads of this test"


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def run_beside(threads: IdleThreads) -> threading.Thread:
    """Return what a task runs on."""
    done, on = threading.Event(), []
    threads.run(lambda: (on.append(threading.current_thread()), done.set()))
    assert done.wait(60)
    return on[0]


def run(threads: IdleThreads) -> threading.Thread:
    """Return what a task runs on, once the thread looks for another."""
    thread = run_beside(threads)
    wait_until_idle(threads, thread)
    return thread


def wait_until_idle(threads: IdleThreads, thread: threading.Thread) -> None:
    while thread.is_alive() and len(threads._idle.inboxes) < len(running()):
        thread.join(0.001)


def test_a_thread_that_is_done_takes_the_next_task_and_keeps_nothing_of_the_last_one() -> None:
    threads = IdleThreads(NAME)

    class Memory:
        def __call__(self) -> None:
            done.set()

    done, memory = threading.Event(), Memory()
    first = run(threads)
    assert run(threads) is first
    threads.run(memory)
    assert done.wait(60)
    wait_until_idle(threads, first)
    gone = weakref.ref(memory)
    del memory
    assert gone() is None
    threads.close()
    threads.close()
    first.join(60)
    assert not running()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tasks_run_beside_others_whatever_becomes_of_those() -> None:
    threads, go_on = IdleThreads(NAME), threading.Event()
    threads.run(lambda: go_on.wait(60))
    busy = running()
    threads.run(lambda: 1 // 0)
    while len(running()) > 1:
        [thread.join(0.001) for thread in running() if thread not in busy]
    other = run_beside(threads)
    assert other not in busy
    threads.close()
    other.join(60)
    assert running() == busy
    go_on.set()
    busy[0].join(60)
    assert not running()


def test_threads_end_with_their_owner() -> None:
    threads = IdleThreads(NAME)
    thread = run(threads)
    del threads
    gc.collect()
    thread.join(60)
    assert not running()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    threads = IdleThreads(NAME)
    run(threads)
    pid = os.fork()
    if pid == 0:
        done = threading.Event()
        threads.run(done.set)
        os._exit(0 if done.wait(60) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    threads.close()
