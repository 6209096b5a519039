import fcntl
import os
import pty
import selectors
import struct
import termios
import threading
from collections.abc import Iterator

import pytest

from lightning_ft.supervision.output import Output, Writer


class Screen:
    """An output whose writes are collected, with ranks that are only descriptors."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.written: list[tuple[int, bytes]] = []
        self.output = Output(self.selector, lambda target, data: self.written.append((target, data)), stdout, stderr)
        self.ranks: dict[int, tuple[int, int]] = {}

    def start(self, *slots: int) -> None:
        for slot in slots:
            self.ranks[slot] = self.output.open(slot)

    def prints(self, slot: int, data: bytes, stream: int = 0) -> None:
        os.write(self.ranks[slot][stream], data)
        is_slow = os.isatty(self.ranks[slot][stream])  # a terminal hands on what was written a moment later
        while ready := self.selector.select(30.0 if is_slow else 0.0):
            is_slow = False
            for key, _ in ready:
                key.data()

    def ends(self, slot: int) -> None:
        for descriptor in self.ranks.pop(slot):
            os.close(descriptor)
        self.output.close(slot)

    def take(self) -> bytes:
        """Return what was written since the last call, whatever it was written to."""
        written, self.written = self.written, []
        return b"".join(data for _, data in written)

    def close(self) -> None:
        for slot in list(self.ranks):
            self.ends(slot)
        self.selector.close()


@pytest.fixture
def screen() -> Iterator[Screen]:
    """Return a screen whose stdout and stderr are files."""
    descriptors = [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
    screen = Screen(*descriptors)
    yield screen
    screen.close()
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def terminal() -> Iterator[Screen]:
    """Return a screen whose stdout and stderr are a terminal of 33 x 111 characters."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, 111, 0, 0))
    screen = Screen(slave, slave)
    yield screen
    screen.close()
    os.close(master)
    os.close(slave)


def test_lines_are_written_whole_and_name_their_slot(screen: Screen) -> None:
    screen.start(0, 1)
    screen.prints(0, b"one, ")
    screen.prints(1, b"other\n")
    assert screen.take() == b"[slot 1] other\n"
    screen.prints(0, b"two\nthree")
    assert screen.take() == b"[slot 0] one, two\n"
    screen.ends(0)
    assert screen.take() == b"[slot 0] three\n"


def test_both_streams_go_where_they_belong(screen: Screen) -> None:
    screen.start(2)
    screen.prints(2, b"out\n", stream=0)
    screen.prints(2, b"err\n", stream=1)
    (stdout, out), (stderr, err) = screen.written
    assert (out, err) == (b"[slot 2] out\n", b"[slot 2] err\n")
    assert stdout != stderr


def test_prefix_can_be_switched_off(screen: Screen) -> None:
    screen.output.prefix = False
    screen.start(1)
    screen.prints(1, b"plain\n")
    assert screen.take() == b"plain\n"


def test_bar_that_returns_to_its_start_is_shown_as_it_moves(screen: Screen) -> None:
    screen.start(0)
    screen.prints(0, b"\r 10%")
    screen.prints(0, b"\r 20%\r")
    screen.prints(0, b"\n\ndone\r\n")
    assert screen.take() == b"\r[slot 0]  10%\r[slot 0]  20%\r\n[slot 0] \n[slot 0] done\r\n"


def test_line_without_end_does_not_fill_the_memory(screen: Screen) -> None:
    screen.start(0)
    for _ in range(40):
        screen.prints(0, b"x" * 32768)
    assert len(screen.take()) > 1 << 20


def test_own_words_and_tracebacks_go_to_stderr(screen: Screen) -> None:
    screen.output.say("Slot 1 died.")
    screen.output.show(1, "Traceback:\n  no\n")
    assert [data for _, data in screen.written] == [
        b"[lightning-ft] Slot 1 died.\n",
        b"[slot 1] Traceback:\n[slot 1]   no\n",
    ]
    assert len({target for target, _ in screen.written}) == 1


def test_paused_output_loses_nothing(screen: Screen) -> None:
    screen.start(0, 1)
    screen.output.pause()
    screen.prints(0, b"late\n")
    assert screen.take() == b""
    screen.start(2)
    screen.prints(2, b"new\n")
    screen.ends(1)
    screen.output.resume()
    screen.prints(0, b"more\n")
    assert sorted(screen.take().splitlines()) == [b"[slot 0] late", b"[slot 0] more", b"[slot 2] new"]


def test_leader_has_the_terminal_for_itself(terminal: Screen) -> None:
    terminal.start(0, 1)
    stdout, stderr = terminal.ranks[0]
    assert os.isatty(stdout)
    assert os.isatty(stderr)
    assert os.get_terminal_size(stdout) == (111, 33)
    terminal.prints(0, b"\x1b[1m 10%\r\n", stream=1)
    assert terminal.take() == b"\x1b[1m 10%\r\n"
    terminal.prints(1, b"hello\n")
    assert terminal.take() == b"[slot 1] hello\n"


def test_lines_of_others_do_not_run_into_the_leaders_bar(terminal: Screen) -> None:
    terminal.start(0, 1)
    terminal.prints(0, b"\r 10%")
    terminal.prints(1, b"hello\n")
    terminal.prints(0, b"\r 20%")
    terminal.output.say("Slot 1 died.")
    assert terminal.take() == b"\r 10%\r\x1b[K[slot 1] hello\n\r 20%\n[lightning-ft] Slot 1 died.\n"


def test_terminal_goes_to_the_next_leader(terminal: Screen) -> None:
    terminal.start(0, 1)
    terminal.prints(0, b"\r 10%")
    terminal.prints(1, b"held")
    terminal.ends(0)
    assert terminal.take() == b"\r 10%\n"
    terminal.output.lead(1)
    terminal.prints(1, b"\r 20%")
    assert terminal.take() == b"held\n\r 20%"


def test_ranks_follow_the_size_of_the_terminal(terminal: Screen) -> None:
    terminal.start(1)
    real = terminal.output._stdout
    fcntl.ioctl(real, termios.TIOCSWINSZ, struct.pack("4H", 40, 90, 0, 0))
    terminal.output.resize()
    assert os.get_terminal_size(terminal.ranks[1][0]) == (90, 40)


def test_stopped_reader_stops_the_output_and_not_the_supervisor() -> None:
    reader, writer = os.pipe()
    has_room = threading.Event()
    output = Writer(on_room=has_room.set)
    data = b"x" * (1 << 20)
    for _ in range(8):
        output.write(writer, data)  # far more than the pipe holds, and this thread goes on
    assert output.is_full()
    received = 0
    while received < 5 * len(data):
        received += len(os.read(reader, 1 << 20))
    assert output.is_full()  # until there is nothing left: who asks in between must not be forgotten
    while received < 8 * len(data):
        received += len(os.read(reader, 1 << 20))
    assert has_room.wait(30.0)
    assert not output.is_full()
    output.close()
    os.close(writer)
    os.close(reader)


def test_reader_that_is_gone_does_not_matter() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = Writer(on_room=lambda: None)
    output.write(writer, b"nobody reads this")
    output.close()
    os.close(writer)
