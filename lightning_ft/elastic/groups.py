"""The process groups of generations, behind the few calls that the engine needs.

gloo is the one that exists. NCCL fits in as another :class:`Groups`: its ``interrupt`` is ``ProcessGroupNCCL.abort``.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store

from lightning_ft.elastic import sockets
from lightning_ft.elastic._torch_compat import create_gloo_group
from lightning_ft.elastic.local_store import LocalStore
from lightning_ft.elastic.vigil import SLICE, Vigil
from lightning_ft.errors import GroupBrokenError

_SLICE = timedelta(seconds=SLICE)
_CONNECT_TIMEOUT = timedelta(seconds=20)


class Work(Protocol):
    """An operation of a group that is under way."""

    def wait(self) -> Any:
        """Return once it is over; raise GroupBrokenError if it failed."""

    def is_completed(self) -> bool:
        """Whether it is over."""


class Group(Protocol):
    """The collectives of one generation."""

    def allreduce(self, tensors: list[Tensor], opts: Any = ...) -> Work:
        """Reduce in place."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Gather into ``outputs``."""

    def broadcast(self, tensors: list[Tensor], opts: Any = ...) -> Work:
        """Broadcast in place."""

    def start(self, collective: str, *args: Any) -> Work:
        """Start any collective, by its name; the last argument are its options."""


class Groups(Protocol):
    """Makes the groups of generations and of replicas, and breaks them off."""

    def create(self, rank: int, size: int, vigil: Vigil, *, name: str = "", waits: Vigil | None = None) -> Group:
        """Connect the members of a generation, or some of them.

        Args:
            rank: Position of this rank among them.
            size: How many they are.
            vigil: How to wait in it.
            name: Which part of the members it is, if not all of them.
            waits: How to wait once it is connected, in a group that outlives the generation; it is a replica's.

        """

    def interrupt(self, generation: int) -> None:
        """Make whatever waits inside ``generation`` in this process raise soon; called from another thread."""

    def interrupt_replica(self, generation: int) -> None:
        """The same for the group of a replica that was made in ``generation``."""

    def retire(self, group: Group) -> None:
        """Let go of an interrupted group without waiting for what is left in it."""

    def close(self) -> None:
        """The process is about to end."""


class GlooGroups:
    """gloo groups that find each other in the supervisor's store.

    Args:
        store: Address of the store.

    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._retired: list[GlooGroup] = []

    def create(self, rank: int, size: int, vigil: Vigil, *, name: str = "", waits: Vigil | None = None) -> "GlooGroup":
        """Connect the members of a generation, or some of them."""
        # In a thread that can be left behind: a peer that dies between "go" and its own set-up leaves the others waiting
        # for its address or its connection, and nothing wakes them up before gloo's own timeout.
        connected: Future[ProcessGroup] = Future()
        generation = vigil.generation
        store = LocalStore(self._store, _CONNECT_TIMEOUT)

        def connect() -> None:
            try:
                prefix = f"generation/{generation}/{name}" if name else f"generation/{generation}"
                address = (sockets.generation_address if waits is None else sockets.replica_address)(generation)
                group = create_gloo_group(PrefixStore(prefix, store), rank, size, address, _CONNECT_TIMEOUT)
                connected.set_result(group)
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name=f"lightning-ft-connect-{generation}", daemon=True).start()
        while not wait([connected], timeout=SLICE).done:
            vigil.still_waiting("connections")
        with _failures_said():
            group = connected.result()
        vigil.arrived()
        return GlooGroup(group, waits or vigil, store)

    def interrupt(self, generation: int) -> None:
        """Shut down the sockets of ``generation``."""
        sockets.shut_down(sockets.generation_address(generation))

    def interrupt_replica(self, generation: int) -> None:
        """Shut down the sockets of a replica that was made in ``generation``."""
        sockets.shut_down(sockets.replica_address(generation))

    def retire(self, group: Group) -> None:
        """Drop groups in which nothing is left; keep the others, since dropping one waits for what is left in it."""
        if isinstance(group, GlooGroup):
            self._retired.append(group)
        self._retired = [group for group in self._retired if not group.is_idle()]

    def close(self) -> None:
        """Never drop what is still busy: the interpreter's end would wait for it."""
        for group in self._retired:
            group.leak()


class GlooGroup:
    """A gloo group whose waits end when its generation does.

    Args:
        group: The process group.
        vigil: How to wait in it.
        store: Where its ranks found each other, if it is to be kept for the group: torch keeps the half of it that is C++.

    """

    def __init__(self, group: ProcessGroup, vigil: Vigil, store: Store | None = None) -> None:
        self._group = group
        self._store = store
        self._vigil = vigil
        self._timeout = timedelta(seconds=vigil.timeout)
        self._works: list[dist.Work] = []

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce in place."""
        return self._begin(self._group.allreduce, tensors, self._bounded(opts or dist.AllreduceOptions()))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Gather into ``outputs``."""
        return self._begin(self._group.allgather, outputs, inputs, self._bounded(c10d.AllgatherOptions()))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Broadcast in place."""
        return self._begin(self._group.broadcast, tensors, self._bounded(opts or dist.BroadcastOptions()))

    def start(self, collective: str, *args: Any) -> Work:
        """Start any collective of gloo, by its name."""
        return self._begin(getattr(self._group, collective), *args[:-1], self._bounded(args[-1]))

    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return all(work.is_completed() for work in self._works)

    def leak(self) -> None:
        """Never drop the group."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _bounded(self, opts: Any) -> Any:
        opts.timeout = self._timeout
        return opts

    def _begin(self, operation: Callable[..., dist.Work], *args: Any) -> "_SlicedWork":
        with _failures_said():
            work = operation(*args)
        self._works = [work for work in self._works if not work.is_completed()]
        self._works.append(work)
        return _SlicedWork(work, self._vigil)


class _SlicedWork:
    """Waits in slices: gloo does not wake up a send whose own write met the shut-down socket."""

    def __init__(self, work: dist.Work, vigil: Vigil) -> None:
        self._work = work
        self._vigil = vigil

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        while True:
            try:
                self._work.wait(_SLICE)
                break
            except RuntimeError:
                if self._work.is_completed():
                    with _failures_said():
                        self._work.wait(_SLICE)  # raises if it failed; it may have succeeded just after the slice ended
                    break
            self._vigil.still_waiting("its peers in an operation")
        self._vigil.arrived()


@contextmanager
def _failures_said() -> Iterator[None]:
    """Tell what fails in a group from what fails around it."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBrokenError(str(error)) from error
