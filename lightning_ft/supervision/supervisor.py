"""The parent of all ranks: starts them, sees them end, tells the others, and is not a rank itself.

Run as ``python -m lightning_ft.supervision.supervisor --num-slots N -- PROGRAM``; not to be imported by what it imports.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import get_args

from lightning_ft.elastic.options import StartMethod
from lightning_ft.elastic.protocol import NO_SLOT, Assign, Enter, FromRank, FromSupervisor, RankEnvironment
from lightning_ft.events.log import EventLog
from lightning_ft.supervision import program
from lightning_ft.supervision.actions import Action, Ask, Finish, Notice, Record, Send, Show, Signal, Spawn
from lightning_ft.supervision.command import SUPERVISOR_MODULE
from lightning_ft.supervision.control import Control
from lightning_ft.supervision.conversations import Conversations, Process
from lightning_ft.supervision.host_memory import HostMemory
from lightning_ft.supervision.membership import Membership
from lightning_ft.supervision.memory import OutOfMemoryKills
from lightning_ft.supervision.output import Output, Writer
from lightning_ft.supervision.processes import become_subreaper, end_group, is_stopped
from lightning_ft.supervision.spares import Spares
from lightning_ft.supervision.starting import Starter
from lightning_ft.supervision.store import StoreServer

log = logging.getLogger(SUPERVISOR_MODULE)  # __name__ is "__main__" here

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class _Speaker(logging.Handler):
    """Shows log records as words of the supervisor's."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.say(self.format(record))


class Supervisor:
    """Carries out what :class:`~lightning_ft.supervision.membership.Membership` decides.

    Args:
        num_slots: How many slots the job has.
        starter: Starts ranks; made before this, as long as the process had one thread.

    """

    def __init__(self, num_slots: int, starter: Starter) -> None:
        self._num_slots = num_slots
        self._starter = starter
        self._membership = Membership(num_slots)
        self._spares = Spares()
        self._processes: dict[int, Process] = {}  # by process id
        self._slots: dict[int, Process] = {}
        self._selector = selectors.DefaultSelector()
        starter.watch(self._selector, self._on_started)
        self._memory_kills = OutOfMemoryKills()
        self._events = EventLog(slot=None)
        self._run_id = secrets.token_hex(8)
        self._events.emit("run", run_id=self._run_id, num_slots=num_slots, pid=os.getpid())
        self._memory = HostMemory(num_slots)
        self._store = StoreServer(self._selector)
        self._conversations = Conversations(self._selector, self._find, self._on_message)
        self._control = Control(self._selector, self._membership, self._perform)
        self._wakeup = self._handle_signals()
        self._writer = Writer(on_room=self._wake)
        self._output = Output(self._selector, self._writer.write)
        logging.getLogger("lightning_ft").addHandler(_Speaker(self._output))
        if starter.obstacle is not None:
            log.warning("Ranks start from nothing, which takes seconds: forking is not safe, %s.", starter.obstacle)
        self._exit_code: int | None = None

    def run(self) -> int:
        """Run the job to its end and return its exit code."""
        try:
            while self._exit_code is None:
                while actions := self._membership.tick(time.monotonic()):
                    for action in actions:
                        self._perform(action)
                if self._exit_code is None:
                    self._tend_spares()
                    self._wait()
        finally:
            for pid in self._processes:
                end_group(pid)  # spares, and what they started
            self._starter.close()
            self._conversations.close()
            self._store.close()
            self._control.close()
            self._writer.close()
            self._events.close()
            self._memory.close()
        return self._exit_code

    def _wait(self) -> None:
        """Return when something happened and was taken note of."""
        self._output.prefix = self._membership.policy.prefix_output
        if self._membership.members:
            self._output.lead(self._membership.members[0])
        if self._writer.is_full():
            self._output.pause()
        deadlines = [self._membership.deadline(), self._spares.deadline(self._membership.num_spares)]
        deadline = min((deadline for deadline in deadlines if deadline is not None), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            registered = self._selector.get_map().get(key.fd)
            if registered is not None and registered.data is key.data:  # else an earlier one of these closed it
                key.data()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.slot, action.message)
        elif isinstance(action, Spawn):
            self._spawn(action.slot, action.incarnation)
        elif isinstance(action, Signal):
            self._signal(action.slot, action.number)
        elif isinstance(action, Ask):
            self._ask(action.slot)
        elif isinstance(action, Show):
            self._output.show(action.slot, action.traceback)
        elif isinstance(action, Notice):
            self._output.say(action.text)
        elif isinstance(action, Record):
            self._events.emit(action.event, **action.fields)
        elif isinstance(action, Finish):
            if action.error is not None:
                self._output.say(action.error)
            self._exit_code = action.code

    # Processes.

    def _spawn(self, slot: int, incarnation: int) -> None:
        if (spare := self._spares.take(time.monotonic())) is None:
            self._start(slot, incarnation)
        else:
            self._assign(spare, slot, incarnation)

    def _start(self, slot: int, incarnation: int) -> None:
        env = RankEnvironment(
            slot=max(slot, NO_SLOT),
            incarnation=incarnation,
            num_slots=self._num_slots,
            supervisor=self._conversations.address,
            store=self._store.address,
            run_id=self._run_id,
            memory=self._memory.name,
        )
        inherits = slot == 0 and incarnation == 0 and sys.stdin is not None
        stdin = os.dup(0) if inherits else os.open(os.devnull, os.O_RDONLY)
        stdout, stderr = self._output.open(slot)
        try:
            self._starter.start((slot, incarnation), {**os.environ, **env.to_environ()}, (stdin, stdout, stderr))
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)

    def _on_started(self, pid: int, key: tuple[int, int]) -> None:
        slot, incarnation = key
        self._processes[pid] = self._slots[slot] = Process(slot, incarnation, pid)
        if slot < 0:
            self._events.emit("spare", pid=pid)
        else:
            self._membership.started(slot, incarnation, pid)

    def _tend_spares(self) -> None:
        """Start spares that are missing, and send on those that wait before a call that is over."""
        for spare in self._spares.take_due(self._membership.num_spares, time.monotonic()):
            self._start(spare, 0)
        for spare, call in self._spares.take_behind(self._membership.call):
            self._send(spare, Enter(type="enter", call=call, mode="skip", shard=0, shard_size=1, step=0))

    def _assign(self, spare: int, slot: int, incarnation: int) -> None:
        process = self._slots[slot] = self._slots.pop(spare)
        process.slot, process.incarnation = slot, incarnation
        self._output.hand_over(spare, slot)
        self._membership.started(slot, incarnation, process.pid)
        self._send(slot, Assign(type="assign", slot=slot, incarnation=incarnation))

    def _signal(self, slot: int, number: int) -> None:
        if (process := self._slots.get(slot)) is not None:
            os.kill(process.pid, number)  # alive, or not reaped yet

    def _ask(self, slot: int) -> None:
        if (process := self._slots.get(slot)) is not None:
            self._membership.found(slot, process.incarnation, is_stopped(process.pid))
            self._send(slot, {"type": "query"})

    def _reap(self) -> None:
        """Take note of all processes that ended: ranks, what their own children left, the zygote."""
        ran_out = self._memory_kills.has_risen()
        while True:
            try:
                peeked = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if peeked is None:
                return
            pid = peeked.si_pid
            if pid not in self._processes:
                self._starter.settle()  # it may be a rank that was faster than the news of its start
            self._conversations.accept_all()  # what it said before it ended
            if pid in self._processes:
                end_group(pid)  # before the next line: until then nobody else can have this number
            _, status = os.waitpid(pid, 0)
            self._starter.forget(pid)
            process = self._processes.pop(pid, None)
            if process is not None:
                self._bury(process, os.waitstatus_to_exitcode(status), ran_out)

    def _bury(self, process: Process, code: int, ran_out: bool) -> None:
        self._conversations.end(process)  # its last words explain its end
        del self._slots[process.slot]
        self._output.close(process.slot)
        if process.slot < 0:
            self._events.emit("spare_exit", pid=process.pid, code=code)
            self._spares.ended(process.slot, time.monotonic())
        else:
            hint = "the kernel ran out of memory" if ran_out and code == -signal.SIGKILL else None
            self._membership.exited(process.slot, process.incarnation, code, time.monotonic(), hint)

    # What ranks say.

    def _find(self, pid: int) -> Process | None:
        """Return the process with this number, if it is one of the job's."""
        if pid not in self._processes:
            self._starter.settle()
        return self._processes.get(pid)

    def _send(self, slot: int, message: FromSupervisor) -> None:
        if (process := self._slots.get(slot)) is not None:
            self._conversations.send(process, message)

    def _on_message(self, process: Process, message: FromRank) -> None:
        if process.slot < 0:
            self._on_message_of_spare(process.slot, message)
            return
        if message["type"] == "log":
            self._events.open(message["directory"])
            self._control.tell_address(message["directory"])
        self._membership.message(process.slot, process.incarnation, message, time.monotonic())

    def _on_message_of_spare(self, spare: int, message: FromRank) -> None:
        if message["type"] == "park":
            self._spares.parked(spare, message["call"])
        elif message["type"] == "exception":
            log.warning("A spare raised %s: %s.", message["exception"], message["message"])

    # Signals.

    def _handle_signals(self) -> socket.socket:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGCHLD, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell does for SIGINT in the background
                signal.signal(number, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._on_wakeup(reader))
        return writer

    def _wake(self) -> None:
        self._wakeup.send(b"\0")

    def _on_wakeup(self, reader: socket.socket) -> None:
        numbers = set(reader.recv(1 << 12))
        for number in _FORWARDED:
            if number in numbers:
                self._membership.signalled(number, time.monotonic())
        if signal.SIGCHLD in numbers:
            self._reap()
        if signal.SIGWINCH in numbers:
            self._output.resize()
        if 0 in numbers:
            self._output.resume()


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise the program on the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="lightning_ft.supervision.supervisor")
    parser.add_argument("--num-slots", type=int, required=True)
    parser.add_argument("--start-method", choices=get_args(StartMethod), default="auto")
    parser.add_argument("--directory")
    parser.add_argument("--ranks-choose-threads", action="store_true", help="OMP_NUM_THREADS is ours, not the user's.")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    command: list[str] = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if arguments.directory is not None:
        os.chdir(arguments.directory)
    program.set_import_path(command)
    become_subreaper()
    starter = Starter(command, arguments.start_method)
    if arguments.ranks_choose_threads:
        os.environ.pop("OMP_NUM_THREADS", None)
    return Supervisor(arguments.num_slots, starter).run()


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # to free what was imported for ranks would take half a second, and somebody waits for the job
