"""What one phase of a training writes: rollout after rollout, attempt after attempt."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module

from lightning_ft.dump.background import Background
from lightning_ft.dump.hooks import ModuleHooks
from lightning_ft.dump.index import Moment
from lightning_ft.dump.layout import Attempt, begin_attempt
from lightning_ft.dump.options import PhaseOptions
from lightning_ft.dump.recorder import Recorder
from lightning_ft.dump.runs import Run
from lightning_ft.dump.selection import Selection
from lightning_ft.dump.values import activate, deactivate
from lightning_ft.dump.writer import PartWriter

log = logging.getLogger(__name__)


class PhaseDump:
    """The dumps of one phase, in one process.

    Args:
        dirpath: Where dumps of all roles lie.
        role: Which model it is.
        phase: Which phase.
        run: The run.
        options: What is dumped.

    """

    def __init__(self, dirpath: str | os.PathLike[str], *, role: str, phase: str, run: Run, options: PhaseOptions) -> None:
        self.phase = phase
        self.options = options
        self.rollout: int | None = None
        """The rollout that is being dumped by this process."""
        self.recorder: Recorder | None = None
        self.path: Path | None = None
        """The attempt that it writes."""
        self._dirpath = Path(dirpath)
        self._role = role
        self._run = run
        self._selection = Selection(options.filter)
        self._background: Background | None = None
        self._writer: PartWriter | None = None
        self._hooks: ModuleHooks | None = None
        self._latest: Moment | None = None
        self._has_state = False
        self._optimizers: list[Any] = []
        self._part = 0

    @property
    def is_open(self) -> bool:
        """Whether this process writes."""
        return self.recorder is not None

    def begin(self, rollout: int, num_parts: int = 1, *, clean: bool = False) -> Path | None:
        """Begin an attempt; return its path, or None if that failed, which is told.

        Args:
            rollout: Id of the rollout.
            num_parts: How many ranks write.
            clean: Whether this process may remove what earlier runs left.

        """
        try:
            if clean:
                self._run.remove_earlier(self.phase)
            attempt = Attempt(self._role, self.phase, rollout, self._run.run_id, num_parts, time.time())
            return begin_attempt(self._dirpath, attempt)
        except OSError as error:
            log.warning("Rollout %s is not dumped: %s. The training goes on.", rollout, error)
            return None

    def open(self, path: Path | None, rollout: int, module: Module, part: int = 0) -> None:
        """Write a part of the attempt at ``path`` from now on; of none if that is None."""
        self.rollout, self.path, self._part = rollout, path, part
        self._latest, self._has_state, self._optimizers = None, False, []
        if path is None:
            return
        options = self.options
        self._background = self._background or Background(options.max_bytes)
        self._writer = PartWriter(path, part, self._background, dtype=options.torch_dtype())
        self.recorder = Recorder(self._writer, self._selection)
        self.resume(module)

    def pause(self) -> None:
        """Leave the module alone until :meth:`resume`. May be called twice."""
        if self.recorder is not None:
            deactivate(self.recorder)
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def resume(self, module: Module) -> None:
        """Watch the module again, if this process writes."""
        if self.recorder is not None and self._hooks is None:
            self._hooks = ModuleHooks(module, self.recorder)
            activate(self.recorder)

    def is_next(self, moment: Moment) -> bool:
        """Whether ``moment`` comes after those that were dumped; otherwise the training was taken back."""
        return self._latest is None or moment.follows(self._latest)

    def begin_batch(self, moment: Moment) -> None:
        """Say that a batch begins."""
        self._latest = moment
        if self.recorder is not None:
            self.recorder.at(moment)

    def end_batch(self) -> None:
        """Say that a batch is over."""
        if self.recorder is not None:
            self.recorder.end_batch()

    def dump_state(self, module: Module, moment: Moment) -> None:
        """Collective in the replica, at the first batch of an attempt. Dump parameters and buffers, once."""
        if self.recorder is not None and not self._has_state:
            self._has_state = True
            self.recorder.record_state(module, moment, keep=self._part == 0)

    def dump_gradients(self, module: Module, optimizers: Sequence[Any], optimizer: Any) -> None:
        """Collective in the replica, at the first step of an optimizer in an attempt. Dump gradients and its state, once."""
        if self.recorder is None or self._latest is None or any(optimizer is known for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        number = next((n for n, other in enumerate(optimizers) if other is optimizer), 0)
        self.recorder.record_gradients(module, optimizer, number, self._latest, keep=self._part == 0)

    def commit(self) -> None:
        """Have what was dumped so far marked as whole, in the background."""
        if self._writer is not None:
            self._writer.finish()

    def close(self, *, commit: bool) -> None:
        """Write no more of this attempt, but what was dumped already. May be called twice.

        Args:
            commit: Whether it is whole; otherwise it never will be, unless it was before.

        """
        self.pause()
        if self._writer is not None:
            if commit:
                self._writer.finish()
            self._writer.close()
        self._writer = self.recorder = None
        self.rollout = self.path = None

    def wait(self) -> None:
        """Return once everything is written that was dumped so far."""
        if self._background is not None:
            self._background.wait()

    def end(self) -> None:
        """Return once everything is written; nothing is dumped from now on. May be called twice."""
        self.close(commit=False)
        if self._background is not None:
            self._background.close()
            self._background = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes of copies that waited to be written at once."""
        return 0 if self._background is None else self._background.peak_bytes
