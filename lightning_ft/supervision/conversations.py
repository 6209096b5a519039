"""The supervisor's ends of the control channels: who is connected, and what they say."""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_ft.elastic.channel import Channel, accept, listen
from lightning_ft.elastic.protocol import FromRank, FromSupervisor
from lightning_ft.supervision.command import SUPERVISOR_MODULE

log = logging.getLogger(SUPERVISOR_MODULE)


@dataclass
class Process:
    """A process that the supervisor started."""

    slot: int  # negative: a spare
    incarnation: int
    pid: int
    channels: list[Channel[FromRank]] = field(default_factory=list)  # the first is answered; others bring last words


class Conversations:
    """Listens to all processes of the job.

    Args:
        selector: Tells when somebody has something to say; the data of its keys are what to call then.
        find: Returns the process with a number, None if it is none of the job's.
        heed: Called with each message, and who sent it.

    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        find: Callable[[int], Process | None],
        heed: Callable[[Process, FromRank], None],
    ) -> None:
        self._selector = selector
        self._find = find
        self._heed = heed
        self._listener, self.address = listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def accept_all(self) -> None:
        """Take in who connected meanwhile."""
        while self._accept():
            pass

    def end(self, process: Process) -> None:
        """Heed what a process said before it ended."""
        for channel in list(process.channels):
            self._receive(process, channel)
            self._hang_up(process, channel)

    def send(self, process: Process, message: FromSupervisor) -> None:
        """Tell a process, if it is connected."""
        if not process.channels:
            return
        channel = process.channels[0]
        try:
            channel.send(message)
        except OSError:
            return  # it is ending; SIGCHLD will say so
        self._watch(channel)

    def close(self) -> None:
        """Let nobody connect any more."""
        self._listener.close()

    def _accept(self) -> bool:
        """Accept one connection; return whether there was one."""
        accepted = accept(self._listener)
        if accepted is None:
            return False
        channel, pid = accepted
        process = self._find(pid)
        if process is None:
            log.warning("Process %d asked to be a rank, but is none.", pid)
            channel.close()
            return True
        process.channels.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._converse(process, channel))
        return True

    def _converse(self, process: Process, channel: Channel[FromRank]) -> None:
        with contextlib.suppress(OSError):  # receive will see the same
            channel.flush()
        self._watch(channel)
        self._receive(process, channel)
        if channel.eof:
            self._hang_up(process, channel)

    def _receive(self, process: Process, channel: Channel[FromRank]) -> None:
        while True:
            try:
                messages = channel.receive()
            except ValueError as error:
                log.warning("Slot %d sent what is no message (%s).", process.slot, error)
                channel.eof = True
                return
            if not messages:
                return
            for message in messages:
                self._heed(process, message)

    def _watch(self, channel: Channel[FromRank]) -> None:
        """Ask for the moment when a rank takes what it did not take yet."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        key = self._selector.get_key(channel)
        if key.events != events:
            self._selector.modify(channel, events, key.data)

    def _hang_up(self, process: Process, channel: Channel[FromRank]) -> None:
        self._selector.unregister(channel)
        channel.close()
        process.channels.remove(channel)
