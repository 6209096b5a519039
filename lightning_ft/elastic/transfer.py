"""Sends typed state from one rank to others over TCP: a header, then one storage after the other, without copies.

Sockets of our own instead of messages of the process group, because a wait for them can be ended: they have the address of
their generation at one end and are shut down with it.
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_ft.elastic.sockets import generation_address
from lightning_ft.elastic.state_codec import EncodedState, allocate, decode

_LENGTH = struct.Struct("=q")
_TOKEN_BYTES = 7  # fits into the int64 in which ranks tell each other
_SLICE = 0.05


class StateServer:
    """Where a rank hands out state during one reconfiguration; others learn ``port`` and ``token`` from it.

    Args:
        generation: Number of the generation.
        is_over: Whether a newer generation superseded it.

    """

    def __init__(self, generation: int, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((generation_address(generation), 0))
        self._listener.settimeout(_SLICE)
        self.port: int = self._listener.getsockname()[1]
        self.token = int.from_bytes(self._token, "little")

    def __enter__(self) -> "StateServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    def send(self, state: EncodedState, count: int, timeout: float) -> None:
        """Send ``state`` to the next ``count`` ranks that ask for it.

        Raises:
            RuntimeError: If the generation is over, or they do not come within ``timeout`` seconds.

        """
        deadline = time.monotonic() + timeout
        while count:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                if self._is_over() or time.monotonic() > deadline:
                    raise RuntimeError(f"{count} ranks did not come for the state.") from None
                continue
            with peer:
                peer.settimeout(timeout)
                count -= self._serve(peer, state)

    def _serve(self, peer: socket.socket, state: EncodedState) -> bool:
        try:
            if _receive(peer, bytearray(_TOKEN_BYTES)) != self._token:
                return False  # somebody else on this machine
            peer.sendall(_LENGTH.pack(len(state.header)) + state.header)
            for storage in state.storages:
                peer.sendall(_memory(storage))
            return bool(_receive(peer, bytearray(1)))  # only now is everything there
        except OSError as error:
            raise RuntimeError(f"A rank went away while it received the state: {error}") from error


def receive_state(generation: int, port: int, token: int, timeout: float) -> Any:
    """Return the state that the rank with that server sends.

    Raises:
        RuntimeError: If it goes away meanwhile.

    """
    try:
        with socket.create_connection((generation_address(generation), port), timeout) as source:
            source.sendall(token.to_bytes(_TOKEN_BYTES, "little"))
            (length,) = _LENGTH.unpack(_receive(source, bytearray(_LENGTH.size)))
            header = bytes(_receive(source, bytearray(length)))
            storages = allocate(header)
            for storage in storages:
                _receive(source, _memory(storage))
            source.sendall(b"!")
    except OSError as error:
        raise RuntimeError(f"The rank that sends the state went away: {error}") from error
    return decode(header, storages)


def _memory(storage: Tensor) -> memoryview:
    return memoryview(storage.numpy())  # type: ignore[arg-type]


def _receive(source: socket.socket, buffer: Any) -> Any:
    """Fill ``buffer`` and return it."""
    view = memoryview(buffer)
    while len(view):
        received = source.recv_into(view)
        if not received:
            raise ConnectionResetError("connection closed")
        view = view[received:]
    return buffer
