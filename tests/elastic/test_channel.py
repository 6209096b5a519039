import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_ft.elastic.channel import Channel, accept, connect, listen


@pytest.fixture
def ends() -> Iterator[tuple[Channel[Any], Channel[Any]]]:
    """Return the supervisor's non-blocking end and a rank's blocking one."""
    here, there = socket.socketpair()
    here.setblocking(False)
    supervisor: Channel[Any] = Channel(here)
    rank: Channel[Any] = Channel(there)
    yield supervisor, rank
    supervisor.close()
    rank.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    supervisor, rank = ends
    for number in range(3):
        rank.send({"type": "progress", "step": number, "text": "line\nbreak \udcff"})
    assert [message["step"] for message in supervisor.receive()] == [0, 1, 2]
    assert supervisor.receive() == []
    assert not supervisor.eof
    supervisor.send({"type": "generation", "number": 1, "incarnations": {0: 0, 3: 2}})
    (message,) = rank.receive()
    assert message["incarnations"] == {0: 0, 3: 2}


def test_supervisor_is_not_stopped_by_a_rank_that_does_not_read(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    supervisor, rank = ends
    text = "x" * 100_000
    for number in range(30):
        supervisor.send({"type": "stop", "message": text, "number": number})
    assert supervisor.pending
    numbers: list[int] = []
    while len(numbers) < 30:
        numbers += [message["number"] for message in rank.receive()]
        supervisor.flush()
    assert numbers == list(range(30))
    assert not supervisor.pending


def test_messages_of_several_threads_do_not_mix(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    supervisor, rank = ends
    supervisor._socket.setblocking(True)

    def talk(name: str) -> None:
        for number in range(100):
            rank.send({"type": "log", "directory": name * 5000, "number": number})

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    received: list[Any] = []
    while len(received) < 300:
        received += supervisor.receive()
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [m["number"] for m in received if m["directory"] == name * 5000] == list(range(100))


def test_last_words_are_heard_after_the_speaker_is_gone(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    supervisor, rank = ends
    supervisor.send({"type": "stop", "message": "never read"})
    rank.send({"type": "progress", "step": 1})
    rank.close()
    assert supervisor.receive() == [{"type": "progress", "step": 1}]
    assert supervisor.receive() == []
    assert supervisor.eof


def test_closing_wakes_the_thread_that_waits(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    _, rank = ends
    received: list[Any] = ["nothing"]
    thread = threading.Thread(target=lambda: received.__setitem__(0, rank.receive()))
    thread.start()
    rank.close()
    thread.join(30.0)
    assert received == [[]]
    rank.close()


def test_what_is_no_message_is_an_error(ends: tuple[Channel[Any], Channel[Any]]) -> None:
    supervisor, rank = ends
    rank._socket.sendall(b"hello\n")
    with pytest.raises(ValueError, match="Expecting value"):
        supervisor.receive()
    rank._socket.sendall(b"[1]\n")
    with pytest.raises(ValueError, match="expected a JSON object"):
        supervisor.receive()


def test_rank_is_known_by_its_process() -> None:
    listener, address = listen()
    assert accept(listener) is None
    rank = connect(address)
    accepted = accept(listener)
    assert accepted is not None
    channel, pid = accepted
    assert pid == os.getpid()
    channel.send({"type": "go", "generation": 1})
    assert rank.receive() == [{"type": "go", "generation": 1}]
    rank.close()
    channel.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(address)
