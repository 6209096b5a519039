"""The event log of one process, and the reader that merges those of a run."""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_ft.events.kinds import as_words

log = logging.getLogger(__name__)

Listener = Callable[[str, dict[str, Any]], None]

_MAX_LINES_IN_MEMORY = 10_000
_MAX_LINE = 1 << 15
_MAX_TEXT = 4000
_scan = json.JSONDecoder().raw_decode
_to_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


class EventLog:
    """Appends events to one file, a line each, so that a SIGKILL never costs more than the event under way.

    Until :meth:`open` is called, and again after :meth:`close`, the newest 10,000 lines are kept in memory. May be used
    by several threads. Trouble with the file is logged once as a warning and never raised: a full disk must not end the
    training. At level DEBUG each event is also logged, as ``event=step slot=0 step=3``.

    Args:
        slot: The slot whose events these are; ``None`` for the supervisor.
        incarnation: How often this slot was started before.
        clock: Returns the time of an event.

    Example::

        events = EventLog(slot=0, incarnation=0)
        events.open("logs/events")
        events.emit("commit", step=3, loss=0.25)

    """

    def __init__(self, slot: int | None, incarnation: int = 0, clock: Callable[[], float] = time.time) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.num_lost = 0
        self._clock = clock
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._num_dropped = 0
        self._fd: int | None = None
        self._inside_line = False
        self._warned = False

    @property
    def filename(self) -> str:
        """Name of the file inside the directory given to :meth:`open`."""
        return "supervisor.jsonl" if self.slot is None else f"slot_{self.slot}.incarnation_{self.incarnation}.jsonl"

    def emit(self, event: str, /, **fields: Any) -> None:
        """Record one event.

        Listeners are called first, on this thread; what one of them raises reaches the caller, and the event is not
        recorded.

        Args:
            event: What happened, one of :data:`~lightning_ft.events.kinds.KINDS` or a kind of your own.
            **fields: Plain JSON data; anything else is written as its ``str``. ``slot`` and ``incarnation`` may be
                given to speak about another process, as the supervisor does.

        """
        record = {"t": self._clock(), "event": event, "slot": self.slot, "incarnation": self.incarnation, **fields}
        for listener in self._listeners:
            listener(event, record)
        line = (_to_json(record) + "\n").encode()
        if len(line) > _MAX_LINE:
            line = (_to_json({name: _cut(value) for name, value in record.items()}) + "\n").encode()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", as_words(record))
        with self._lock:  # not around the listeners: they may emit
            if self._fd is None:
                self._keep(line)
            else:
                self._write(line)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener(event, record)`` for every event from now on, before its line is written."""
        self._listeners = (*self._listeners, listener)

    def open(self, directory: str | os.PathLike[str]) -> None:
        """Write to a file in ``directory`` from now on, beginning with the lines that are in memory."""
        path = Path(directory) / self.filename
        with self._lock:
            self._close()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                size = os.fstat(self._fd).st_size
                self._inside_line = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            except OSError as error:
                self._warn(f"cannot open {path}: {error}")
                return
            if self._num_dropped:
                record = {"t": self._clock(), "event": "events_dropped", "slot": self.slot}
                record |= {"incarnation": self.incarnation, "count": self._num_dropped}
                self._write((_to_json(record) + "\n").encode())
                self._num_dropped = 0
            while self._lines:
                self._write(self._lines.popleft())

    def close(self) -> None:
        """Close the file; later events are kept in memory. May be called twice."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.close(fd)
        except OSError as error:  # some file systems report a failed write only here
            self._warn(f"cannot close {self.filename}: {error}")

    def _keep(self, line: bytes) -> None:
        if len(self._lines) >= _MAX_LINES_IN_MEMORY:
            self._lines.popleft()
            self._num_dropped += 1
        self._lines.append(line)

    def _write(self, line: bytes) -> None:
        assert self._fd is not None
        if self._inside_line:  # otherwise this event would be lost together with the torn one before it
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)  # one call: a signal can't leave half a line
        except OSError as error:
            self.num_lost += 1
            self._warn(str(error))
            return
        if written:
            self._inside_line = line[written - 1 : written] != b"\n"
        if written < len(line):
            self.num_lost += 1
            self._warn("no space left")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("Events are being lost (%s): %s. Training goes on.", self.filename, reason)


def _cut(value: Any) -> Any:
    return f"{value[:_MAX_TEXT]}..." if isinstance(value, str) and len(value) > _MAX_TEXT else value


class Events(list[dict[str, Any]]):
    """Events of a run, sorted by time.

    Args:
        events: The events.
        num_torn: How many lines were left out because the writer died, or the disk was full, in the middle of them.

    """

    def __init__(self, events: Iterable[dict[str, Any]] = (), num_torn: int = 0) -> None:
        super().__init__(events)
        self.num_torn = num_torn


def read_events(directory: str | os.PathLike[str]) -> Events:
    """Merge the event files of a run.

    Args:
        directory: The one given to :meth:`EventLog.open`; may be in use.

    Returns:
        The events, sorted by time. Events of one file that have the same time keep their order. Lines that are not
        whole are left out and counted in ``num_torn``.

    """
    events: list[dict[str, Any]] = []
    num_torn = 0
    for path in sorted(Path(directory).glob("*.jsonl")):
        for line in path.read_bytes().decode(errors="replace").split("\n"):
            record = parse(line)
            if record is not None:
                events.append(record)
            elif line:
                num_torn += 1
                log.info("Left out a torn line of %s.", path)
    events.sort(key=lambda record: float(record["t"]))
    return Events(events, num_torn)


def parse(line: str) -> dict[str, Any] | None:
    """Return the record in a line, or None if this is not a whole one."""
    try:
        record, end = _scan(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("t"), int | float) and not line[end:].strip()
    return record if whole else None
