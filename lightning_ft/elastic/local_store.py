"""A client of the supervisor's store, with torch's interface, over a socket of this host.

Torch's own ``TCPStore`` asks DNS for a name of its peer's address whenever it connects, at both ends: where an answer does
not come, that takes five seconds or more, which everybody in the store waits for. A recovery must not.
"""

from __future__ import annotations

import base64
import select
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store
from typing_extensions import override

from lightning_ft.elastic.channel import Channel, connect


class LocalStore(Store):
    """One connection, for what gloo and those who save together ask: whoever waits in it keeps its other users waiting.

    Args:
        address: Of the store.
        timeout: How long to wait for a value.

    Raises:
        DistNetworkError: From all methods, if the supervisor is gone.

    """

    def __init__(self, address: str, timeout: timedelta) -> None:
        super().__init__()
        self._seconds = timeout.total_seconds()
        self._address = address
        self._channel: Channel[Any] | None = None
        self._lock = threading.Lock()

    @override
    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        self._ask("set", [key], base64.b64encode(value).decode())

    @override
    def get(self, key: str) -> bytes:
        """Return a value once there is one.

        Raises:
            DistStoreError: If that takes too long.

        """
        return base64.b64decode(self._ask("get", [key]))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have a value.

        Raises:
            DistStoreError: If that takes too long.

        """
        deadline = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        for key in keys:
            self._ask("wait", [key], seconds=max(0.0, deadline - time.monotonic()))

    @override
    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def _ask(self, operation: str, keys: list[str], value: str | None = None, seconds: float | None = None) -> Any:
        seconds = self._seconds if seconds is None else seconds
        with self._lock:
            try:
                channel = self._channel = self._channel or connect(self._address)
                channel.send({"type": operation, "keys": keys, "value": value})
                poll = select.poll()
                poll.register(channel, select.POLLIN)
                has_answered = bool(poll.poll(1e3 * seconds))
                replies: list[Any] = channel.receive() if has_answered else []
            except OSError as error:
                raise DistNetworkError(f"The supervisor's store is gone ({error}).") from error
            if replies:
                return replies[0]["value"]
            self._hang_up()  # the answer to this must not be taken for another's
        if has_answered:
            raise DistNetworkError("The supervisor's store is gone.")
        raise DistStoreError(f"Nobody has set {', '.join(keys)} for {seconds:.3g} s.")

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def __del__(self) -> None:
        self._hang_up()
