"""A rank's end of the control channel: a thread that listens to the supervisor, and bounded waits for what it says."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_ft.elastic.channel import connect
from lightning_ft.elastic.protocol import (
    Answer,
    Assign,
    Death,
    Enter,
    FromRank,
    FromSupervisor,
    Generation,
    RankEnvironment,
)
from lightning_ft.errors import CollectiveTimeoutError, StoppedError, SupervisorLostError

log = logging.getLogger(__name__)

Wanted = TypeVar("Wanted")


class SupervisorLink:
    """Sends to the supervisor and keeps the newest of what it said.

    Args:
        environment: Who this rank is and where its supervisor is.
        on_superseded: Called on the listening thread, again and again, with the number of a generation that this rank
            still uses though it is over; must return at once.
        answer: Called on the listening thread when the supervisor asks what the training thread does.

    """

    def __init__(
        self, environment: RankEnvironment, on_superseded: Callable[[int], None], answer: Callable[[], Answer]
    ) -> None:
        self._channel = connect(environment.supervisor)
        self._on_superseded = on_superseded
        self._answer = answer
        self._changed = threading.Condition()
        self._generation: Generation | None = None
        self._dead: list[Death] = []  # in generations that this rank did not wait for: a newer one came first
        self._gone = -1  # the newest generation that got its "go"
        self._assigned: Assign | None = None
        self._entered: Enter | None = None
        self._stop: str | None = None
        self._lost: str | None = None
        self._in_use: int | None = None
        self._asked: int | None = None
        self.join_wanted = False
        self._thread = threading.Thread(target=self._listen, name="lightning-ft-link", daemon=True)
        self._thread.start()

    def send(self, message: FromRank) -> None:
        """Tell the supervisor; it is an error only if the supervisor is gone."""
        try:
            self._channel.send(message)
        except OSError as error:
            raise SupervisorLostError(str(error)) from error

    def use(self, generation: int | None) -> bool:
        """Say which generation this rank's training thread is in: the one to interrupt when a newer one comes.

        Returns:
            Whether it may be used: False if a newer one is there already.

        """
        with self._changed:
            newest = self._generation
            superseded = generation is not None and newest is not None and newest["number"] > generation
            self._in_use = None if superseded else generation
            self._changed.notify_all()
            return not superseded

    def is_over(self, generation: int) -> bool:
        """Whether there is a newer generation than ``generation``."""
        with self._changed:
            return self._generation is not None and self._generation["number"] > generation

    def live(self) -> dict[int, int]:
        """Return the slots of the newest generation, each with its process's incarnation; the ranks may not be there yet."""
        with self._changed:
            newest = self._generation
            return {} if newest is None else {int(slot): count for slot, count in newest["incarnations"].items()}

    def newer_than(self, generation: int) -> Generation | None:
        """Return the newest generation if it is newer than ``generation``; it stays the one to wait for."""
        with self._changed:
            newest = self._generation
            return newest if newest is not None and newest["number"] > generation else None

    def ask_to_stop(self, signal: int) -> None:
        """Have the training thread tell the supervisor of ``signal`` when it waits; called in the signal's handler.

        Not at once: the handler may have interrupted the sending of another message.
        """
        with self._changed:
            self._asked = signal
            self._changed.notify_all()

    def wait_for_slot(self, call: int) -> Assign | None:
        """Return the slot that this spare is to take, or None once the others are past ``call``."""

        def answer() -> tuple[Assign | None] | None:
            if self._assigned is not None:
                return (self._assigned,)
            return (None,) if self._entered is not None and self._entered["call"] == call else None

        return self._wait(answer, None, "")[0]

    def wait_for_enter(self, call: int) -> Enter:
        """Return the supervisor's answer to ``begin``; not bounded, since the others may be hours away from this call."""
        return self._wait(lambda: self._entered if self._entered and self._entered["call"] == call else None, None, "")

    def wait_for_generation(self, after: int, timeout: float | None, what: str) -> Generation:
        """Return the newest generation after number ``after``, with all deaths since the one that was returned before."""

        def answer() -> Generation | None:
            if self._generation is None or self._generation["number"] <= after:
                return None
            self._generation["dead"], self._dead = self._dead, []
            return self._generation

        return self._wait(answer, timeout, what)

    def wait_for_go(self, number: int, timeout: float | None) -> bool:
        """Return True once all members of generation ``number`` are ready, False once there is a newer generation."""

        def answer() -> bool | None:
            assert self._generation is not None
            if self._generation["number"] > number:
                return False
            return True if self._gone >= number else None

        return self._wait(answer, timeout, f"the members of generation {number} to become ready")

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _wait(self, answer: Callable[[], Wanted | None], timeout: float | None, what: str) -> Wanted:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._stop is not None:
                    raise StoppedError(self._stop)
                if (found := answer()) is not None:
                    return found
                if self._lost is not None:
                    raise SupervisorLostError(self._lost)
                if self._asked is not None:
                    signal, self._asked = self._asked, None
                    self.send({"type": "asked", "signal": signal})
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise CollectiveTimeoutError(what, timeout or 0.0)
                self._changed.wait(remaining)

    def _listen(self) -> None:
        lost = "it closed the connection"
        try:
            while messages := self._channel.receive():
                for message in messages:
                    if message["type"] == "query":
                        self._channel.send(self._answer())
                    else:
                        self._take(message)
                self._interrupt_superseded()
        except Exception as error:  # a rank that no longer listens must not go on as if it did
            lost = f"listening to it failed: {error!r}"
        with self._changed:
            self._lost = lost
            self._changed.notify_all()

    def _take(self, message: FromSupervisor) -> None:
        with self._changed:
            match message["type"]:
                case "generation":
                    self._generation = message
                    self._dead += message["dead"]
                case "go":
                    self._gone = max(self._gone, message["generation"])
                case "assign":
                    self._assigned = message
                case "enter":
                    self._entered = message
                case "join_wanted":
                    self.join_wanted = message["value"]
                case "stop":
                    self._stop = message["message"]
            self._changed.notify_all()

    def _interrupt_superseded(self) -> None:
        """Break off the generation in use if a newer one is there, until the training thread has noticed.

        Again and again, because the training thread may be about to open the very sockets that have to go.
        """
        pause = 0.002
        while True:
            with self._changed:
                newest = self._generation
                if newest is None or self._in_use is None or self._in_use >= newest["number"]:
                    return
                superseded = self._in_use
            self._on_superseded(superseded)
            with self._changed:
                if self._in_use == superseded:
                    self._changed.wait(pause)
            pause = min(2 * pause, 0.05)
