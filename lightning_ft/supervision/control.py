"""What a user may ask the supervisor of a running job for: the conversation, without what it leads to.

The supervisor listens on a socket of its own, which turns other users away, and writes its address into the event directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ft.elastic.channel import accept, connect, listen
from lightning_ft.supervision.actions import Action, Record
from lightning_ft.supervision.membership import Membership
from lightning_ft.supervision.requests import Request

FILENAME = "control.json"
_TIMEOUT = 10.0

Reply = dict[str, Any]


class Control:
    """Answers requests on a socket of its own, in the supervisor's loop.

    Args:
        selector: Of the supervisor's loop; its data are called when there is something to read.
        membership: Decides.
        perform: Carries out an action.

    """

    def __init__(self, selector: selectors.BaseSelector, membership: Membership, perform: Callable[[Action], None]) -> None:
        self._selector = selector
        self._membership = membership
        self._perform = perform
        self._listener, self._address = listen()
        self._path: Path | None = None
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tell_address(self, directory: str | os.PathLike[str]) -> None:
        """Write where to ask into a directory, for :func:`ask`."""
        self._forget_address()
        path = Path(directory) / FILENAME
        with contextlib.suppress(OSError):  # nobody can ask then, but the job goes on
            path.write_text(json.dumps({"address": self._address, "pid": os.getpid()}))
            self._path = path

    def close(self) -> None:
        """Answer no more."""
        self._forget_address()
        self._listener.close()

    def _forget_address(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()

    def _accept(self) -> None:
        accepted = accept(self._listener)
        if accepted is not None:
            channel: Any = accepted[0]
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._converse(channel))

    def _converse(self, channel: Any) -> None:
        try:
            for request in channel.receive():
                channel.send(self._answer(request))
        except (OSError, ValueError):  # it hung up, or is none of ours
            channel.eof = True
        if channel.eof:
            self._selector.unregister(channel)
            channel.close()

    def _answer(self, request: Any) -> Reply:
        command, slot, kind = (request.get(name) for name in ("command", "slot", "kind"))
        if command == "status":
            return {"accepted": True, "answer": "", "status": self._membership.status()}
        refusal = self._membership.asked_for(Request(str(command), slot, kind))
        told = {"command": str(command), "target": slot, "kind": kind, "accepted": refusal is None, "answer": refusal or ""}
        self._perform(Record("control", told))
        return {"accepted": refusal is None, "answer": refusal or ""}


def ask(directory: str | os.PathLike[str], command: str, slot: int | None = None, kind: str | None = None) -> Reply:
    """Ask the supervisor of the job whose events are in ``directory``.

    Returns:
        ``accepted``, ``answer``, which says why not, and for ``"status"`` also ``status``.

    Raises:
        ConnectionError: If there is none: the job ended, or is another user's.

    """
    try:
        address = json.loads((Path(directory) / FILENAME).read_text())["address"]
        channel: Any = connect(address)
    except (OSError, ValueError, KeyError):
        raise ConnectionError(
            f"No supervisor answers for {directory}: the job has ended, or has not begun to train."
        ) from None
    try:
        channel.send({"type": "control", "command": command, "slot": slot, "kind": kind})
        has_answered, _, _ = select.select([channel], [], [], _TIMEOUT)
        replies = channel.receive() if has_answered else []
    except OSError:
        replies = []
    finally:
        channel.close()
    if not replies:
        raise ConnectionError(f"The supervisor of {directory} does not answer.")
    reply: Reply = replies[0]
    return reply
