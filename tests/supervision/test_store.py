"""The supervisor's store, with clients in threads and in processes that end."""

import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from lightning_ft.elastic._torch_compat import create_gloo_group
from lightning_ft.elastic.channel import connect
from lightning_ft.elastic.local_store import LocalStore
from lightning_ft.supervision.store import StoreServer

SOON, LONG = timedelta(seconds=0.05), timedelta(seconds=60)


class Loop:
    """A store in a loop like the supervisor's."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        self.server = StoreServer(self._selector)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.05):
                key.data()

    def close(self) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self.server.close()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_clients_see_what_others_set(loop: Loop) -> None:
    one, other = (PrefixStore("p", LocalStore(loop.server.address, LONG)) for _ in range(2))
    with pytest.raises(RuntimeError):  # torch keeps the half of a store that is C++
        one.set("key", "value")
    kept = [LocalStore(loop.server.address, LONG) for _ in range(3)]
    one, other = PrefixStore("p", kept[0]), PrefixStore("p", kept[1])
    one.set("key", "value")
    big = os.urandom(3 << 20)
    one.set("big", big)  # type: ignore[arg-type]
    assert other.get("key") == b"value"
    assert other.get("big") == big
    assert kept[2].get("p/key") == b"value"
    assert (other.check(["key", "big"]), other.check(["key", "none"])) == (True, False)
    assert (kept[2].delete_key("p/key"), kept[2].delete_key("p/key"), other.check(["key"])) == (True, False, False)


def test_who_waits_is_told_and_who_waited_in_vain_does_not_take_a_late_answer_for_another(loop: Loop) -> None:
    early, late = LocalStore(loop.server.address, SOON), LocalStore(loop.server.address, LONG)
    with pytest.raises(DistStoreError, match=r"Nobody has set late for 0\.05 s"):
        early.get("late")
    told: list[bytes] = []
    waiting = threading.Thread(target=lambda: told.append(late.get("late")))
    waiting.start()
    early.set("late", "late")
    waiting.join(60)
    assert told == [b"late"]
    early.set("other", "other")
    assert early.get("other") == b"other"
    early.wait(["late", "other"])
    with pytest.raises(DistStoreError, match="Nobody has set never"):
        late.wait(["other", "never"], SOON)


def test_a_client_that_is_killed_while_it_waits_is_forgotten_and_one_that_talks_nonsense_is_hung_up(loop: Loop) -> None:
    pid = os.fork()
    if pid == 0:
        LocalStore(loop.server.address, LONG).get("never")
        os._exit(0)
    until = time.monotonic() + 60
    while "never" not in loop.server._waiting:
        assert time.monotonic() < until
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while "never" in loop.server._waiting:
        assert time.monotonic() < until
    nonsense = connect(loop.server.address)
    nonsense.send({"type": "get"})
    assert nonsense.receive() == []
    nonsense.close()
    LocalStore(loop.server.address, LONG).set("never", "set")


def test_without_a_supervisor_there_is_an_error_at_once(loop: Loop) -> None:
    store = LocalStore(loop.server.address, LONG)
    store.set("key", "value")
    loop.close()
    for _ in range(2):
        with pytest.raises(DistNetworkError, match="The supervisor's store is gone"):
            store.get("key")


def test_ranks_of_gloo_find_each_other(loop: Loop) -> None:
    stores = [LocalStore(loop.server.address, LONG) for _ in range(4)]
    sums: dict[int, float] = {}

    def run(rank: int) -> None:
        group = create_gloo_group(PrefixStore("group", stores[rank]), rank, 4, "127.0.0.1", LONG)
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.item()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == dict.fromkeys(range(4), 6.0)
