"""The process groups of generations, behind the few calls that the engine needs.

gloo is the one that exists. NCCL fits in as another :class:`Groups`: its ``interrupt`` is ``ProcessGroupNCCL.abort``.
"""

import threading
from datetime import timedelta
from typing import Protocol

from torch.distributed import PrefixStore, ProcessGroup

from lightning_ft.elastic import sockets
from lightning_ft.elastic._torch_compat import connect_store, create_gloo_group


class Groups(Protocol):
    """Makes one process group a generation, and breaks it off."""

    def create(self, generation: int, rank: int, size: int) -> ProcessGroup:
        """Connect the members of ``generation``."""

    def interrupt(self, generation: int) -> None:
        """Make whatever waits inside ``generation`` in this process raise soon; called from another thread."""


class GlooGroups:
    """gloo groups that find each other in the supervisor's store.

    Args:
        host: Host of the store.
        port: Port of the store.
        timeout: Bound of a group's set-up and of each of its operations.

    """

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connecting: tuple[int, frozenset[int]] | None = None

    def create(self, generation: int, rank: int, size: int) -> ProcessGroup:
        # A connection of its own: a peer that dies between "go" and its own set-up leaves the others blocked inside the
        # store's `get`, which only the end of this connection interrupts.
        before = sockets.local_ports_to(self._port)
        store = connect_store(self._host, self._port, self._timeout)
        ports = sockets.local_ports_to(self._port) - before
        with self._lock:
            self._connecting = (generation, ports)
        try:
            address = sockets.generation_address(generation)
            return create_gloo_group(PrefixStore(f"generation/{generation}", store), rank, size, address, self._timeout)
        finally:
            with self._lock:
                self._connecting = None

    def interrupt(self, generation: int) -> None:
        sockets.shut_down_generation(generation)
        with self._lock:
            if self._connecting is not None and self._connecting[0] == generation:
                sockets.shut_down_connections_to(self._port, self._connecting[1])
