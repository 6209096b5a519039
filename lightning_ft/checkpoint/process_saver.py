"""The saver of this process, for saves that no Trainer looks after: what was begun is finished though nobody waits."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakSet

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from lightning_ft.checkpoint._torch_compat import default_store, store_of_default_group
from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.leftovers import collect
from lightning_ft.checkpoint.module_state import MayChange
from lightning_ft.checkpoint.peers import Peers, SoloPeers, StorePeers
from lightning_ft.checkpoint.pending_save import Content, PendingSave
from lightning_ft.checkpoint.snapshot import Fence
from lightning_ft.checkpoint.store_path import Place
from lightning_ft.checkpoint.timed_group import wait_for
from lightning_ft.errors import CheckpointNotCommittedError, StoreUnreachableError

log = logging.getLogger(__name__)

_PATIENCE_AFTER_AN_EXCEPTION = timedelta(seconds=20)
_TIME_TO_LEARN_THE_VERDICT = 10.0  # seconds; the others look for it every few milliseconds
_POLL = 0.01


class ProcessSaver:
    """Saves together with all ranks of the default process group.

    Args:
        group: That group; None for a process alone.
        number: How many there were before it; the same on all ranks.
        timeout: How long rank 0 is waited for.

    """

    run_id: str
    """The same on all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, number: int, timeout: timedelta) -> None:
        self.group = group
        self.pid = os.getpid()
        self._rank, self._world_size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        if group is not None:
            self._server = store_of_default_group()  # in rank 0 it ends with the last reference to it
            self._store, self._waiting = default_store(), default_store()
        self._name = f"process/{number}"
        self.run_id = self._agree("run_id", secrets.token_hex(8), timeout)
        self._peers = self._make_peers(self.run_id)
        self._saver = AsyncSaver(self._peers, on_settled=self._tell)
        self._directories: set[Place] = set()
        self._frozen: dict[Place, int] = {}
        self._lock = threading.Lock()
        self._num_settled = 0
        self._newest: str | None = None
        self._is_quiet = False

    def save(
        self,
        path: Place,
        content: Content,
        optimizers: Iterable[Optimizer],
        may_change: MayChange,
        replaces: Collection[Place],
        timeout: timedelta,
    ) -> PendingSave:
        """Collective. Begin to save; ``optimizers`` wait before their next step until all is copied."""
        self._enter(path.parent, timeout)
        for optimizer in optimizers:
            if optimizer not in _fenced:
                Fence([optimizer], wait_for_copy)
                _fenced.add(optimizer)
        return self._saver.save(path, content, replaces=replaces, may_change=may_change, timeout=timeout)

    def save_frozen(self, path: Place, content: Content, replaces: Collection[Place], timeout: timedelta) -> None:
        """Collective. Save what nobody changes, in any thread, beside other saves; return once it is there."""
        with self._lock:
            number = self._frozen[path] = self._frozen.get(path, 0) + 1
        name = xxhash.xxh3_64_hexdigest(os.fsencode(path))
        peers = self._make_peers(f"{self.run_id}-{name}-{number}")
        saver = AsyncSaver(peers, timeout=timeout, on_settled=self._tell)
        try:
            saver.save(
                path, content, replaces=replaces, may_change=lambda name, tensor: not name.startswith("optimizer_")
            ).wait()
        finally:
            saver.close()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Have a failure of the save that is begun and awaited in the body raised only, not told as well."""
        self._saver.wait()
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def wait_for_copy(self) -> None:
        """Return once what is being saved may change."""
        self._saver.wait_for_copy()

    def close(self) -> None:
        """Finish what was begun."""
        crashed = getattr(sys, "last_value", None) is not None  # its peers may have, too, and are not waited for as long
        try:
            self._saver.wait(_PATIENCE_AFTER_AN_EXCEPTION)
        except TimeoutError as error:
            log.warning("%s%s", error, "" if crashed else " The process waits for it before it ends.")
            if not crashed:
                self._saver.wait()
        deadline = time.monotonic() + _TIME_TO_LEARN_THE_VERDICT
        while self._rank == 0 and not self._all_know() and time.monotonic() < deadline:
            time.sleep(_POLL)  # the store may end with this process
        self._saver.close()

    def _enter(self, directory: Place, timeout: timedelta) -> None:
        """Collective with the first save into a directory. Remove what writers that died left there."""
        if directory in self._directories:
            return
        if self._rank == 0:
            with suppress(OSError, StoreUnreachableError):  # told by the save
                collect(directory)
        self._agree(f"directory/{len(self._directories)}", "", timeout)  # nobody stages before
        self._directories.add(directory)

    def _agree(self, key: str, value: str, timeout: timedelta) -> str:
        """Collective. Return the value of rank 0.

        Raises:
            CollectiveTimeoutError: If rank 0 does not come.

        """
        if self.group is None:
            return value
        key = f"lightning_ft/{self._name}/{key}"
        if self._rank == 0:
            self._store.set(key, value)
            return value
        wait_for(self._waiting, {key: 0}, "save", timeout)
        return bytes(self._waiting.get(key)).decode()

    def _make_peers(self, run_id: str) -> Peers:
        return SoloPeers() if self.group is None else StorePeers(self._store, self._rank, self._world_size, run_id)

    def _tell(self, save: PendingSave) -> None:
        with self._lock:
            self._num_settled += 1
            with suppress(RuntimeError):  # rank 0 is gone
                self._peers.post(f"{self._name}/settled/{self._rank}", str(self._num_settled).encode())
        if save.error is None:
            self._newest = str(save.target)
            return
        if isinstance(save.error, CheckpointNotCommittedError):
            step, reason, because_of_death, _ = save.error.args
            save.error = CheckpointNotCommittedError(step, reason, because_of_death, self._newest)
        if self._rank == 0 and not self._is_quiet:
            log.warning("%s", save.error)

    def _all_know(self) -> bool:
        told = [self._peers.peek(f"{self._name}/settled/{rank}") for rank in range(self._world_size)]
        return all(int(number or b"0") >= self._num_settled for number in told)


def _is_of_module(name: str, tensor: Tensor) -> bool:
    """Whether ranks need not have a tensor alike: it is not known which of a module's are buffers."""
    return not name.startswith("optimizer_")


_fenced: WeakSet[Optimizer] = WeakSet()
_current: ProcessSaver | None = None
_num_groups = 0


def process_saver(timeout: timedelta) -> ProcessSaver:
    """Collective with the first save after the default process group was made. Return the saver of this process.

    Raises:
        CollectiveTimeoutError: If rank 0 does not come within ``timeout``.

    """
    global _current, _num_groups
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _current is None or _current.pid != os.getpid() or _current.group is not group:
        close()
        _current = ProcessSaver(group, _num_groups, timeout)
        _num_groups += group is not None
    return _current


def wait_for_copy() -> None:
    """Return once parameters and optimizer state may change; only needed before changes that no optimizer makes."""
    if _current is not None and _current.pid == os.getpid():
        _current.wait_for_copy()


def close() -> None:
    """Finish what was begun and end the writer process; the next save starts another. Happens at exit, too."""
    global _current
    if _current is not None and _current.pid == os.getpid():
        _current.close()
    _current = None


atexit.register(close)
