"""Unblocks gloo: finds the sockets of one generation in this process and shuts them down.

``ProcessGroupGloo`` has no abort. A thread that waits in a collective wakes up within a millisecond when the sockets of
its group are shut down. Each generation listens on its own loopback address, so its sockets are told apart from all
others of the process (the user's included) without racing against threads that open some meanwhile. Linux only.
"""

import os
import socket
import stat
from collections.abc import Iterator


def generation_address(number: int) -> str:
    """Return the loopback address of generation ``number``."""
    return f"127.77.{number // 250 % 250}.{number % 250 + 1}"


def replica_address(number: int) -> str:
    """Return the loopback address within the replicas that were made in generation ``number``."""
    return f"127.78.{number // 250 % 250}.{number % 250 + 1}"


def shut_down(address: str) -> int:
    """Shut down the connected sockets that have ``address`` at one end; return how many there were."""
    return sum(_shut_down(sock) for sock, ends in _connected_sockets() if address in ends)


def _connected_sockets() -> Iterator[tuple[socket.socket, tuple[str, str]]]:
    """Yield a duplicate of every connected internet socket of this process, with the addresses of its two ends.

    Listeners are left out: a gloo listener must never be shut down, its accept loop would end the process.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since it was listed
        with sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                local, remote = sock.getsockname()[0], sock.getpeername()[0]
            except OSError:
                continue  # not connected, or not any more
            yield sock, (local.removeprefix("::ffff:"), remote.removeprefix("::ffff:"))


def _shut_down(sock: socket.socket) -> bool:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # the peer was faster
    return True
