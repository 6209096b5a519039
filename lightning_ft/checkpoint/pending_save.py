"""A save that was begun, as whoever asked for it sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_ft.checkpoint.commit import Post
from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.checkpoint.store_path import Place

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """What is to be saved.

    Args:
        state: Nested dicts and lists of tensors and small objects, for torch's distributed checkpoint.
        files: Returns further files of the rank that has a seat.
        manifest: Without what only the saver knows.
        agreed: What must be the same on all ranks; or nothing is committed.

    """

    state: dict[str, Any]
    files: Callable[[Seat], dict[str, bytes]]
    manifest: Manifest
    agreed: str = ""


class PendingSave:
    """A save under way.

    Args:
        target: The directory that it becomes.
        step: Whose state it is.
        is_twin: Whether it shares files with an earlier one.

    """

    def __init__(self, target: Place, step: int, *, is_twin: bool = False) -> None:
        self.target = target
        self.step = step
        self.is_twin = is_twin
        self.content = target
        """Where its files are once it is a checkpoint."""
        self.replaces: tuple[Place, ...] = ()
        """Checkpoints that go once this one is there."""
        self.error: BaseException | None = None
        """Why it did not become a checkpoint; only to be looked at once it is :attr:`done`."""
        self.write_seconds = 0.0
        """How long writing took in this rank."""
        self.stall_seconds = 0.0
        """How long the training of this rank was kept waiting for it."""
        self.copied = threading.Event()
        self.post = Post()
        """What this rank wrote."""
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it is a checkpoint, or failed."""
        return self._settled.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once it is a checkpoint.

        Raises:
            TimeoutError: If it takes longer than ``timeout``.
            CheckpointNotCommittedError: If it failed.

        """
        if not self._settled.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"Checkpoint {self.target} was not committed within {timeout}; it is still being saved.")
        if self.error is not None:
            raise self.error

    def wait_for_copy(self) -> None:
        """Return once what is being saved may change; optimizers do so by themselves."""
        self.copied.wait()

    def then(self, action: Callable[[], None]) -> None:
        """Have something done once this is a checkpoint: in its thread, or now if it is one already."""
        with self._lock:
            if not self.done:
                self._then.append(action)
                return
        if self.error is None:
            action()

    def settle(self, error: BaseException | None) -> None:
        """Say how it ended."""
        with self._lock:
            self.error = error
            self.copied.set()
            for action in self._then if error is None else ():
                try:
                    action()
                except OSError:
                    log.exception("What was to be done once %s was there failed.", self.target)
            self._settled.set()
