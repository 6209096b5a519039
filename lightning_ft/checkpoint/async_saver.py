"""Saves in the background: the training goes on while the state is copied, written and committed."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch import Tensor

from lightning_ft.checkpoint.idle_threads import IdleThreads
from lightning_ft.checkpoint.image_pool import ImagePool
from lightning_ft.checkpoint.peers import Peers
from lightning_ft.checkpoint.pending_save import Content, PendingSave
from lightning_ft.checkpoint.save_task import Means, SaveTask
from lightning_ft.checkpoint.store_path import Place, place
from lightning_ft.checkpoint.writer import Writer

log = logging.getLogger(__name__)

_KEPT_ON_THE_BOARD = 8
"""Saves whose posts stay in the store after they are settled, for ranks that have not read them yet."""
_TIME_TO_GIVE_UP = timedelta(seconds=5)


class AsyncSaver:
    """Saves the state of one rank, together with its peers.

    Args:
        peers: The ranks that save together.
        timeout: When a save is given up that a rank has not written by then.
        max_pending: How many saves may be under way: so many copies of this rank's share are held in memory.
        on_settled: Called in a thread when a save succeeded or failed, before others learn of it.

    """

    def __init__(
        self,
        peers: Peers,
        *,
        timeout: timedelta = timedelta(minutes=30),
        max_pending: int = 1,
        on_settled: Callable[[PendingSave], None] = lambda save: None,
    ) -> None:
        self.writer = writer = Writer()
        self.stall_seconds = 0.0
        """How long the training was kept waiting so far."""
        self._means = Means(peers, writer, ImagePool(writer), timeout, on_settled)
        self._max_pending = max_pending
        self._pending: deque[PendingSave] = deque()
        self._tasks: deque[SaveTask] = deque()
        self._threads = IdleThreads("lightning_ft-save")

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves under way, oldest first."""
        return tuple(save for save in self._pending if not save.done)

    def save(
        self,
        target: str | os.PathLike[str],
        content: Content,
        *,
        replaces: Iterable[Place] = (),
        may_change: Callable[[str, Tensor], bool] = lambda name, tensor: True,
        twin_of: PendingSave | None = None,
        timeout: timedelta | None = None,
    ) -> PendingSave:
        """Collective. Begin to save; wait first if there are too many under way.

        Args:
            target: The directory that it becomes, in a file system or a store.
            content: What to save. What does not change before the next optimizer step is read until then, see
                :meth:`wait_for_copy`.
            replaces: Checkpoints that go once this one is there.
            may_change: Whether a tensor, by its name in ``content.state``, may change in forward and backward passes, and
                so differ between ranks that hold it: it is copied at once, and saved as the first rank has it.
            twin_of: An earlier save of the same state, on all ranks alike: the tensors' files are shared with it.
            timeout: When this save is given up; None: as all are.

        """
        if twin_of is None:
            self.wait_for_copy()
        started = time.monotonic()
        if twin_of is None:
            while len(pending := [save for save in self.pending if not save.is_twin]) >= self._max_pending:
                with suppress(Exception):  # told by `on_settled`
                    pending[0].wait()
        previous = self._pending[-1] if self._pending else None
        roll = self._means.peers.enroll()
        save = PendingSave(place(target), content.manifest.step, is_twin=twin_of is not None)
        save.replaces = tuple(replaces)
        if roll is None:
            save.settle(None)
            return save
        task = SaveTask(self._means, save, roll, content, timeout or self._means.timeout)
        self._pending = deque([*self.pending, save])
        if twin_of is None:
            task.prepare(content, may_change, previous)
        else:
            task.prepare_twin(content, twin_of)
        self._threads.run(partial(task.run, self._pop_old(task)))
        taken = time.monotonic() - started
        save.stall_seconds += taken
        self.stall_seconds += taken
        return save

    def wait_for_copy(self) -> None:
        """Return once what is being saved may change."""
        for save in self._pending:
            if not save.copied.is_set():
                started = time.monotonic()
                save.copied.wait()
                taken = time.monotonic() - started
                save.stall_seconds += taken
                self.stall_seconds += taken

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once nothing is being saved any more; how it ended each save says.

        Raises:
            TimeoutError: If it takes longer than ``timeout``.

        """
        for save in self.pending:
            try:
                save.wait(timeout)
            except TimeoutError:
                raise
            except Exception:  # told by `on_settled`
                log.debug("%s failed", save.target, exc_info=True)

    def close(self) -> None:
        """End the writer process, and with an error what is still being saved. May be called twice."""
        self._means.closed = True
        self.writer.close()
        for save in self._pending:
            with suppress(Exception):
                save.wait(_TIME_TO_GIVE_UP)
        self._threads.close()
        self._means.images.close()

    def _pop_old(self, task: SaveTask) -> SaveTask | None:
        """Return the save whose posts nobody looks for any more once ``task`` is done."""
        self._tasks.append(task)
        return self._tasks.popleft() if len(self._tasks) > _KEPT_ON_THE_BOARD + self._max_pending else None
