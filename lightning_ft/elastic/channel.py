"""How the control channel's messages travel: one abstract AF_UNIX stream socket, a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from lightning_ft.elastic.protocol import FromRank, FromSupervisor

Received = TypeVar("Received", FromRank, FromSupervisor)


def _decode(line: bytes | bytearray) -> Any:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"{line[:80]!r} is no message: expected a JSON object.")
    if message.get("type") == "generation":  # JSON has no integer keys
        message["incarnations"] = {int(slot): incarnation for slot, incarnation in message["incarnations"].items()}
    return message


class Channel(Generic[Received]):
    """Messages over a stream socket; the socket's own blocking mode decides how it is used.

    On a blocking socket (a rank) one thread loops over ``while messages := channel.receive()`` while any thread sends.
    On a non-blocking socket (the supervisor's selector loop) :meth:`send` never blocks: what the peer does not take
    stays in ``pending`` until :meth:`flush`, so that a stopped rank cannot stop the supervisor.

    Args:
        sock: A connected stream socket; the channel owns it.

    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._lock = threading.Lock()
        self.eof = False

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes wait for :meth:`flush`."""
        return bool(self._outgoing)

    def send(self, message: Mapping[str, object]) -> None:
        """Send ``message`` whole; safe from any thread.

        Raises:
            OSError: If the peer is gone.

        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._outgoing += line
            self._flush()

    def flush(self) -> None:
        """Send what a non-blocking socket did not take before.

        Raises:
            OSError: If the peer is gone.

        """
        with self._lock:
            self._flush()

    def receive(self) -> list[Received]:
        """Return the next messages, at least one; ``[]`` when the peer is gone.

        On a non-blocking socket ``[]`` also means that no whole message is there yet; ``eof`` tells the two apart.

        Raises:
            ValueError: If the peer sent something else than messages.

        """
        while not self.eof:
            try:
                chunk = self._socket.recv(1 << 16)
            except BlockingIOError:
                return []
            except OSError:  # reset by a peer that was killed with unread messages, or closed by another thread
                chunk = b""
            if not chunk:
                self.eof = True
                break
            self._incoming += chunk
            if b"\n" not in chunk:
                continue
            *lines, rest = self._incoming.split(b"\n")
            self._incoming = bytearray(rest)
            if lines:
                return [_decode(line) for line in lines]
        return []

    def close(self) -> None:
        """Close the connection; a thread blocked in :meth:`receive` returns ``[]``."""
        with contextlib.suppress(OSError):  # the peer was faster, or this is the second call
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            del self._outgoing[:sent]


def listen() -> tuple[socket.socket, str]:
    """Return a non-blocking listener on a fresh abstract address, and that address for :func:`connect`.

    Abstract, so that no file is left behind whatever kills the supervisor.
    """
    address = f"@lightning-ft-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + address[1:])
    listener.listen(128)
    listener.setblocking(False)
    return listener, address


def accept(listener: socket.socket) -> tuple[Channel[FromRank], int] | None:
    """Accept one rank; return its non-blocking channel and its process id, or None if nobody waits.

    Abstract sockets have no permissions: another user's process is turned away here.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid == os.getuid():
            sock.setblocking(False)
            return Channel[FromRank](sock), pid
        sock.close()


def connect(address: str) -> Channel[FromSupervisor]:
    """Return a blocking channel to the supervisor at ``address``.

    Raises:
        OSError: If the supervisor is gone.

    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address[1:])
    except OSError:
        sock.close()
        raise
    return Channel[FromSupervisor](sock)
