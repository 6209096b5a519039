"""A fault that a test wants, as plain data, and what happens when it fires."""

import builtins
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightning_ft.elastic.checks import check_count, check_type

Kind = Literal["kill", "stop", "exit", "raise"]
HookPoint = Literal[
    "setup",
    "sanity_check",
    "fit_start",
    "train_start",
    "train_epoch_start",
    "train_batch_start",
    "forward",
    "backward_early",
    "gradients_ready",
    "before_optimizer_step",
    "train_batch_end",
    "validation_start",
    "validation_batch",
    "validation_end",
    "save_checkpoint",
    "during_save",
    "train_epoch_end",
    "train_end",
    "test_batch",
    "predict_batch",
]
EventPoint = Literal[
    "join_requested",
    "handing_out",
    "handed_out",
    "healed",
    "admitted",
    "joined",
    "generation",
    "operation_failed",
    "leader",
]
Point = HookPoint | EventPoint

HOOK_POINTS: tuple[str, ...] = get_args(HookPoint)
EVENT_POINTS: tuple[str, ...] = get_args(EventPoint)

_POLL_INTERVAL = 0.001


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong once, in one process, at a known place.

    Args:
        kind: "kill": SIGKILL; "stop": SIGSTOP; "exit": ``os._exit(code)``; "raise": an exception.
        slot: The slot that it happens to.
        point: Where. Those in a training step: "train_batch_start", "forward" (before ``training_step``),
            "backward_early" (the first gradient is there), "gradients_ready" (all of this rank's gradients are there,
            their reduction is not finished), "before_optimizer_step" (gradients are reduced, nothing is applied),
            "train_batch_end". "during_save" is where the leader wrote a checkpoint's file that does not carry its
            final name yet. Points named like an event of FTStrategy are where that event is about to be recorded.
        step: Not before the trainer has made this many steps; None: whenever the point is reached.
        occurrence: How often the point must have been reached before, counted from ``step`` on.
        incarnation: Which process of the slot; None: whichever comes there first.
        rendezvous: Whether all live ranks are to have reached the same point of the same step when it fires. They stay
            there until it did. Only at points that every rank reaches.
        code: Exit code for "exit", and for a ``SystemExit`` that is raised.
        error: Name of the builtin exception for "raise".
        message: What the exception says.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is not valid.

    """

    kind: Kind
    slot: int
    point: Point
    step: int | None = None
    occurrence: int = 0
    incarnation: int | None = 0
    rendezvous: bool = False
    code: int = 1
    error: str = "RuntimeError"
    message: str = "a fault that was planned"

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("kind", self.kind, get_args(Kind)),
            ("point", self.point, (*HOOK_POINTS, *EVENT_POINTS)),
        ):
            if value not in valid:
                raise ValueError(f"`Fault({name}={value!r})` is not valid: expected one of {', '.join(valid)}.")
        check_count("Fault", "slot", self.slot)
        check_count("Fault", "occurrence", self.occurrence)
        for name, number in (("step", self.step), ("incarnation", self.incarnation)):
            if number is not None:
                check_count("Fault", name, number)
        check_type("Fault", "rendezvous", self.rendezvous, bool, "True or False")
        if self.rendezvous and self.point in EVENT_POINTS:
            raise ValueError(f"`Fault(point={self.point!r}, rendezvous=True)` is not valid: not every rank gets there.")
        check_type("Fault", "error", self.error, str, "the name of a builtin exception")
        error = getattr(builtins, self.error, None)
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise ValueError(f"`Fault(error={self.error!r})` is not valid: expected the name of a builtin exception.")

    def strike(self) -> None:
        """Let it happen to this process; returns only after a "stop" that somebody continued."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "exit":
            os._exit(self.code)
        elif self.error == "SystemExit":
            raise SystemExit(self.code)
        else:
            raise getattr(builtins, self.error)(self.message)


class Ledger:
    """Which faults of a plan fired, and who waits for one, in files that outlive the processes.

    Args:
        directory: Shared by all processes of the job, and by no other job.
        timeout: Seconds that a rank waits at a rendezvous.

    """

    def __init__(self, directory: str | os.PathLike[str], timeout: float) -> None:
        self._directory = Path(directory)
        self._timeout = timeout

    def mark_fired(self, index: int) -> bool:
        """Record on the disk that a fault fires now; return whether this process is the first to say so."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path(index, "fired"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True

    def has_fired(self, index: int) -> bool:
        """Return whether a fault fired."""
        return self._path(index, "fired").exists()

    def arrive(self, index: int, slot: int) -> None:
        """Say that ``slot`` reached the place of a fault."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path(index, f"arrived_{slot}").touch()

    def wait_for_others(self, index: int, slots: Collection[int]) -> None:
        """Return once all ``slots`` arrived.

        Raises:
            TimeoutError: Naming those who did not.

        """

        def missing() -> list[int]:
            return [slot for slot in slots if not self._path(index, f"arrived_{slot}").exists()]

        self._wait(lambda: not missing(), lambda: f"fault {index} waited for slots {missing()}")

    def wait_until_fired(self, index: int) -> None:
        """Return once a fault fired.

        Raises:
            TimeoutError: If it did not.

        """
        self._wait(lambda: self.has_fired(index), lambda: f"this rank waited for fault {index} to fire")

    def _path(self, index: int, what: str) -> Path:
        return self._directory / f"fault_{index}.{what}"

    def _wait(self, condition: Callable[[], bool], describe: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"At a rendezvous {describe()} for {self._timeout:g} s and gave up.")
            time.sleep(_POLL_INTERVAL)  # files of other processes: nothing here could wake this thread up
