"""Values that ranks leave for each other with the supervisor: where they listen, what those that start later must know."""

from __future__ import annotations

import contextlib
import selectors
from collections import defaultdict
from typing import Any

from lightning_ft.elastic.channel import Channel, accept, listen

_NOT_YET = object()


class StoreServer:
    """Answers :class:`~lightning_ft.elastic.local_store.LocalStore` in the supervisor's loop.

    Args:
        selector: Of the supervisor's loop; its data are called when there is something to read.

    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[Channel[Any], bool]]] = defaultdict(list)
        self._listener, self.address = listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Let nobody connect any more."""
        self._listener.close()

    def _accept(self) -> None:
        accepted = accept(self._listener)
        if accepted is not None:
            channel: Channel[Any] = accepted[0]
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._converse(channel))

    def _converse(self, channel: Channel[Any]) -> None:
        try:
            channel.flush()
            while requests := channel.receive():
                for request in requests:
                    answer = self._answer(channel, request["type"], request["keys"], request["value"])
                    if answer is not _NOT_YET:
                        self._reply(channel, answer)
        except (OSError, ValueError, LookupError, TypeError):  # it hung up, or is none of ours
            channel.eof = True
        if channel.eof:
            self._hang_up(channel)
        else:
            self._watch(channel)

    def _answer(self, channel: Channel[Any], operation: str, keys: list[str], value: Any) -> Any:
        values = self._values
        if operation == "check":
            return all(key in values for key in keys)
        (key,) = keys
        match operation:
            case "set":
                return self._set(key, value)
            case "get" | "wait":
                if key in values:
                    return values[key] if operation == "get" else None
                self._waiting[key].append((channel, operation == "get"))
                return _NOT_YET
            case "delete":
                return values.pop(key, None) is not None
        raise ValueError(operation)

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        for channel, wants_value in self._waiting.pop(key, []):
            with contextlib.suppress(OSError):  # the loop will see that it is gone
                self._reply(channel, value if wants_value else None)

    def _reply(self, channel: Channel[Any], value: Any) -> None:
        channel.send({"value": value})
        self._watch(channel)

    def _watch(self, channel: Channel[Any]) -> None:
        """Ask for the moment when a rank takes what it did not take yet."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        key = self._selector.get_key(channel)
        if key.events != events:
            self._selector.modify(channel, events, key.data)

    def _hang_up(self, channel: Channel[Any]) -> None:
        self._selector.unregister(channel)
        channel.close()
        for key, waiting in list(self._waiting.items()):
            self._waiting[key] = [entry for entry in waiting if entry[0] is not channel]
            if not self._waiting[key]:
                del self._waiting[key]
