"""The few Linux calls that tie processes to each other: whose orphans are whose, and who ends with whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, so that it sees their exits through ``waitpid``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_subreaper() -> bool:
    """Return whether :func:`become_subreaper` was called in this process."""
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when ``parent``, its parent, ends; end it now if that already happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def num_threads() -> int:
    """Return how many threads this process has, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False  # it is gone


def end_group(pid: int) -> None:
    """End what the session leader ``pid`` left behind, such as its loaders' workers."""
    with contextlib.suppress(ProcessLookupError):  # it left nothing, or died before it was a leader
        os.killpg(pid, signal.SIGKILL)
