import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_ft.elastic.sockets import generation_address, shut_down


@contextmanager
def connected(address: str) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, a connection to it, and the accepted end."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((address, 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        accepted, _ = listener.accept()
        accepted.settimeout(10)
        yield listener, client, stack.enter_context(accepted)


def test_addresses_of_neighbouring_generations_differ() -> None:
    addresses = [generation_address(number) for number in range(2000)]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith("127.77.") and not address.endswith((".0", ".255")) for address in addresses)


def test_shutting_down_a_generation_wakes_up_a_thread_that_reads_from_it() -> None:
    with connected(generation_address(7)) as (_, client, accepted):
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(accepted.recv(1)))
        thread.start()
        assert shut_down(generation_address(7)) >= 1
        thread.join(timeout=10)
        assert received == [b""]
        assert client.recv(1) == b""


def test_sockets_of_other_generations_and_of_the_user_are_left_alone() -> None:
    with connected(generation_address(8)) as (_, client, accepted), connected("127.0.0.1") as (_, mine, yours):
        shut_down(generation_address(7))
        for one, other in ((client, accepted), (mine, yours)):
            one.sendall(b"x")
            assert other.recv(1) == b"x"


def test_a_listener_is_never_shut_down() -> None:
    with connected(generation_address(9)) as (listener, _, _):
        shut_down(generation_address(9))
        with socket.create_connection(listener.getsockname(), timeout=10) as again:
            accepted, _ = listener.accept()
            with accepted:
                again.sendall(b"x")
                assert accepted.recv(1) == b"x"


def test_a_generation_without_sockets_has_nothing_to_shut_down() -> None:
    assert shut_down(generation_address(1234)) == 0
