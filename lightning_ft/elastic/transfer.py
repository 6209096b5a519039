"""Sends typed state from one rank to others over TCP: a header, then one storage after the other, without copies.

Sockets of our own instead of messages of the process group, because a wait for them can be ended: they have the address of
their generation at one end and are shut down with it.
"""

import secrets
import socket
import struct
from typing import Any

from torch import Tensor

from lightning_ft.elastic.sockets import generation_address
from lightning_ft.elastic.state_codec import EncodedState, allocate, decode
from lightning_ft.elastic.vigil import SLICE, Vigil
from lightning_ft.errors import GroupBrokenError

_LENGTH = struct.Struct("=q")
_TOKEN_BYTES = 7  # fits into the int64 in which ranks tell each other


class StateServer:
    """Where a rank hands out state during one reconfiguration; others learn ``port`` and ``token`` from it.

    Args:
        vigil: How to wait in its generation.

    """

    def __init__(self, vigil: Vigil) -> None:
        self._vigil = vigil
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((generation_address(vigil.generation), 0))
        self._listener.settimeout(SLICE)
        self.port: int = self._listener.getsockname()[1]
        self.token = int.from_bytes(self._token, "little")

    def __enter__(self) -> "StateServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    def send(self, state: EncodedState, count: int) -> None:
        """Send ``state`` to the next ``count`` ranks that ask for it.

        Raises:
            GroupBrokenError: If the generation is over, or they do not come.

        """
        while count:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                self._vigil.still_waiting("a rank to come for the state")
                continue
            self._vigil.arrived()
            with peer:
                peer.settimeout(SLICE)
                count -= self._serve(peer, state)

    def _serve(self, peer: socket.socket, state: EncodedState) -> bool:
        try:
            if _receive(peer, bytearray(_TOKEN_BYTES), self._vigil) != self._token:
                return False  # somebody else on this machine
            _send(peer, _LENGTH.pack(len(state.header)) + state.header, self._vigil)
            for storage in state.storages:
                _send(peer, _memory(storage), self._vigil)
            return bool(_receive(peer, bytearray(1), self._vigil))  # only now is everything there
        except OSError as error:
            raise GroupBrokenError(f"A rank went away while it received the state: {error}") from error


def receive_state(vigil: Vigil, port: int, token: int) -> Any:
    """Return the state that the rank with that server sends.

    Raises:
        GroupBrokenError: If it goes away meanwhile.

    """
    try:
        with socket.create_connection((generation_address(vigil.generation), port), vigil.timeout) as source:
            source.settimeout(SLICE)
            _send(source, token.to_bytes(_TOKEN_BYTES, "little"), vigil)
            (length,) = _LENGTH.unpack(_receive(source, bytearray(_LENGTH.size), vigil))
            header = bytes(_receive(source, bytearray(length), vigil))
            storages = allocate(header)
            for storage in storages:
                _receive(source, _memory(storage), vigil)
            _send(source, b"!", vigil)
    except OSError as error:
        raise GroupBrokenError(f"The rank that sends the state went away: {error}") from error
    return decode(header, storages)


def _memory(storage: Tensor) -> memoryview:
    return memoryview(storage.numpy())  # type: ignore[arg-type]


def _send(target: socket.socket, buffer: Any, vigil: Vigil) -> None:
    view = memoryview(buffer)
    while len(view):
        try:
            view = view[target.send(view) :]
        except TimeoutError:
            vigil.still_waiting("a rank to take the state")
            continue
        vigil.arrived()


def _receive(source: socket.socket, buffer: Any, vigil: Vigil) -> Any:
    """Fill ``buffer`` and return it."""
    view = memoryview(buffer)
    while len(view):
        try:
            received = source.recv_into(view)
        except TimeoutError:
            vigil.still_waiting("a rank to send the state")
            continue
        vigil.arrived()
        if not received:
            raise ConnectionResetError("connection closed")
        view = view[received:]
    return buffer
