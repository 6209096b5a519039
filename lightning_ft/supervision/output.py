"""What ranks print, line by line, onto the supervisor's own output."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import queue
import selectors
import struct
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

_LONGEST_LINE = 1 << 20  # a rank that never ends its line must not fill the supervisor's memory
_LARGEST_BACKLOG = 1 << 22
_MOST_READS = 32  # more than a pipe holds: somebody whom the rank left behind goes on printing
_ERASE_LINE = b"\r\x1b[K"


class _Read(Enum):
    SOME = auto()
    NOTHING = auto()  # for now
    EOF = auto()


class Writer:
    """Writes to descriptors in a thread: a paused terminal or pager stops the output, not the supervisor.

    Args:
        on_room: Called in the writer's thread when the backlog is gone after it was too large.

    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._backlog = 0
        self._was_full = False
        self._thread = threading.Thread(target=self._run, name="lightning-ft-output", daemon=True)
        self._thread.start()

    def write(self, descriptor: int, data: bytes) -> None:
        """Write ``data``, later."""
        with self._lock:
            self._backlog += len(data)
        self._queue.put((descriptor, data))

    def is_full(self) -> bool:
        """Return whether no more should be written until ``on_room`` is called."""
        with self._lock:
            self._was_full = self._was_full or self._backlog > _LARGEST_BACKLOG
            return self._was_full

    def close(self) -> None:
        """Return when everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, data = item
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(descriptor, view) :]
            except OSError:
                pass  # the reader of our output is gone; the training is not
            with self._lock:
                self._backlog -= len(data)
                has_room = self._was_full and self._backlog == 0
                self._was_full = self._was_full and not has_room
            if has_room:
                self._on_room()


@dataclass
class Stream:
    """One stream of one rank: where it is read, and what of it is not shown yet."""

    slot: int
    source: int
    target: int
    is_terminal: bool
    held: bytes = b""
    after_return: bool = False


class Output:
    """The output of all ranks.

    Where the supervisor's own stream is a terminal, ranks get one too, and the leader's bytes pass through as they are,
    so that progress bars work. All other output is shown in whole lines that name their slot.

    Args:
        selector: Streams are registered here with :meth:`read` bound to them as data.
        write: Takes bytes for a descriptor; :meth:`Writer.write`.
        stdout: The supervisor's stdout.
        stderr: The supervisor's stderr.

    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        write: Callable[[int, bytes], None],
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self.prefix: bool | None = None
        self._selector = selector
        self._write = write
        self._stdout = stdout
        self._stderr = stderr
        self._leader = 0
        self._streams: dict[int, list[Stream]] = {}
        self._open_line: int | None = None  # the terminal in which the leader's cursor stands inside a line
        self._paused = False

    def open(self, slot: int) -> tuple[int, int]:
        """Return the descriptors for the stdout and stderr of a new rank; the caller closes them once it is started."""
        if os.isatty(self._stdout) and os.isatty(self._stderr):  # one for both keeps their order
            child = self._open_stream(slot, self._stdout)
            return child, os.dup(child)
        return self._open_stream(slot, self._stdout), self._open_stream(slot, self._stderr)

    def hand_over(self, spare: int, slot: int) -> None:
        """Show the streams of a spare as those of ``slot`` from now on."""
        streams = self._streams.pop(spare, [])
        for stream in streams:
            self._finish(stream)
            stream.slot = slot
        self._streams[slot] = streams

    def lead(self, slot: int) -> None:
        """Let the bytes of ``slot`` pass through from now on."""
        if slot != self._leader:
            self._break_line()
            self._leader = slot
            for stream in self._streams.get(slot, ()):
                if self._passes(stream):
                    self._finish(stream)

    def close(self, slot: int) -> None:
        """Show what a rank that is gone had still printed."""
        for stream in self._streams.pop(slot, ()):
            for _ in range(_MOST_READS):
                if self._read(stream) is not _Read.SOME:
                    break
            self._finish(stream)
            if not self._paused:
                self._selector.unregister(stream.source)
            os.close(stream.source)
        if slot == self._leader:
            self._break_line()

    def say(self, text: str) -> None:
        """Tell the user a line of the supervisor's own."""
        self._break_line()
        self._write(self._stderr, f"[lightning-ft] {text}\n".encode())

    def show(self, slot: int, text: str) -> None:
        """Show ``text`` as if ``slot`` had printed it to stderr."""
        self._break_line()
        prefix = self._prefix(slot, os.isatty(self._stderr))
        lines = [prefix + line + b"\n" for line in text.encode(errors="backslashreplace").splitlines()]
        self._write(self._stderr, b"".join(lines))

    def pause(self) -> None:
        """Read no more; ranks that go on printing will wait, as they would for a slow terminal."""
        if not self._paused:
            self._paused = True
            for stream in self._all():
                self._selector.unregister(stream.source)

    def resume(self) -> None:
        """Read again after :meth:`pause`."""
        if self._paused:
            self._paused = False
            for stream in self._all():
                self._register(stream)

    def resize(self) -> None:
        """Follow the size of the terminal."""
        for stream in self._all():
            if stream.is_terminal:
                _copy_window_size(stream.target, stream.source)

    def _all(self) -> list[Stream]:
        return [stream for streams in self._streams.values() for stream in streams]

    def _open_stream(self, slot: int, target: int) -> int:
        is_terminal = os.isatty(target)
        if is_terminal:
            source, child = pty.openpty()
            attributes = termios.tcgetattr(child)
            attributes[1] &= ~termios.OPOST  # the real terminal processes the output, once
            termios.tcsetattr(child, termios.TCSANOW, attributes)
            _copy_window_size(target, source)
        else:
            source, child = os.pipe()
        os.set_blocking(source, False)
        stream = Stream(slot, source, target, is_terminal)
        self._streams.setdefault(slot, []).append(stream)
        if not self._paused:
            self._register(stream)
        return child

    def _register(self, stream: Stream) -> None:
        def read() -> None:
            if self._read(stream) is _Read.EOF:
                self._close_stream(stream)

        self._selector.register(stream.source, selectors.EVENT_READ, read)

    def _close_stream(self, stream: Stream) -> None:
        self._finish(stream)
        self._streams[stream.slot].remove(stream)
        self._selector.unregister(stream.source)
        os.close(stream.source)

    def _read(self, stream: Stream) -> _Read:
        """Show what there is."""
        try:
            chunk = os.read(stream.source, 1 << 16)
        except BlockingIOError:
            return _Read.NOTHING
        except OSError as error:
            if error.errno != errno.EIO:  # what a terminal answers once nobody has it open
                raise
            chunk = b""
        if not chunk:
            return _Read.EOF
        if self._passes(stream):
            self._open_line = None if chunk.endswith(b"\n") else stream.target
            self._write(stream.target, chunk)
            return _Read.SOME
        segments = (stream.held + chunk).splitlines(keepends=True)  # at "\n", "\r" and "\r\n"
        stream.held = b"" if segments[-1].endswith((b"\n", b"\r")) else segments.pop()
        if len(stream.held) > _LONGEST_LINE:
            segments.append(stream.held + b"\n")
            stream.held = b""
        shown = [self._format(stream, segment) for segment in segments]
        if shown:
            self._break_line(erase=True)
            self._write(stream.target, b"".join(shown))
        return _Read.SOME

    def _format(self, stream: Stream, segment: bytes) -> bytes:
        follows_return, stream.after_return = stream.after_return, segment.endswith(b"\r")
        if segment == b"\r" or (segment == b"\n" and follows_return):
            return segment
        return self._prefix(stream.slot, stream.is_terminal) + segment

    def _finish(self, stream: Stream) -> None:
        """Show the line that was never ended."""
        if stream.held:
            self._break_line(erase=True)
            self._write(stream.target, self._format(stream, stream.held + b"\n"))
            stream.held = b""

    def _prefix(self, slot: int, is_terminal: bool) -> bytes:
        wanted = self.prefix if self.prefix is not None else not is_terminal or slot != self._leader
        name = b"[spare]" if slot < 0 else b"[slot %d]" % slot
        return name + b" " if wanted else b""

    def _passes(self, stream: Stream) -> bool:
        return stream.is_terminal and stream.slot == self._leader and self.prefix is not True

    def _break_line(self, erase: bool = False) -> None:
        """Keep other output out of the leader's unfinished line: a bar is drawn again, a text goes to its own line."""
        if self._open_line is not None:
            self._write(self._open_line, _ERASE_LINE if erase else b"\n")
            self._open_line = None


def _copy_window_size(source: int, target: int) -> None:
    size = fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)
