"""``prepare_data`` on the live rank 0, on the next one if that dies in it, while the others wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import data_connector

from lightning_ft.elastic.collectives import Collectives


def prepare_data_elastically(trainer: Trainer, collectives: Collectives, is_leader: Callable[[], bool]) -> None:
    """Replace this trainer's ``prepare_data``, whose barrier is a process group that a death would leave hanging.

    Args:
        trainer: The trainer.
        collectives: Of the live ranks.
        is_leader: Whether this rank is rank 0 now.

    """
    connector = trainer._data_connector
    prepare = type(connector).prepare_data.__get__(connector)

    def prepare_data() -> None:
        prepared = False
        while not prepared:
            leader = is_leader()
            with _no_barrier():
                prepare()
            yes, total = collectives.count(leader)
            prepared = yes > 0 or total == 1  # a joiner is alone: the others have prepared the data

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


@contextmanager
def _no_barrier() -> Iterator[None]:
    original = data_connector._InfiniteBarrier
    data_connector._InfiniteBarrier = nullcontext  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        data_connector._InfiniteBarrier = original  # type: ignore[misc]
