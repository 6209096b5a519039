"""What a rank reads when it reads the stream of another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_ft.data.workers import start_of_workers
from lightning_ft.elastic.engine import SoloEngine
from lightning_ft.strategies.joint_loaders import CombinedBatches
from lightning_ft.strategies.stream_sources import StreamSources


class Numbered(SoloEngine):
    """Knows which rank it was numbered as."""

    num_slots = 2
    number = (0, 2)

    @contextmanager
    def numbered_as(self, rank: int, num_ranks: int) -> Iterator[None]:
        self.number = rank, num_ranks
        yield
        self.number = (0, 2)


class Part(IterableDataset[int]):
    """Takes its part when it is made, as many datasets do."""

    def __init__(self, engine: Numbered) -> None:
        self.rank, self.size = engine.number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 9, self.size))


def sharded() -> DataLoader[int]:
    data: Any = range(9)
    return DataLoader(data, batch_size=None, sampler=DistributedSampler(data, num_replicas=2, rank=0, shuffle=False))


def read(sources: StreamSources, rank: int, num_ranks: int) -> list[Any]:
    stream = sources.find(rank, num_ranks)
    with stream.entered():
        return [torch.as_tensor(batch).tolist() for batch in stream.source]


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: CombinedLoader([loader])], ids=["plain", "combined"])
def test_loaders_of_a_method_are_made_again_for_the_rank(wrap: Any) -> None:
    engine = Numbered()

    def make() -> Any:
        return DataLoader(Part(engine), batch_size=None)

    sources = StreamSources(engine, [make()], lambda loaders: loaders[0], lambda: wrap(make()), shards=True)
    assert read(sources, 0, 2) == [0, 2, 4, 6, 8]
    assert read(sources, 2, 3) == [2, 5, 8]
    assert read(sources, 0, 2) == [0, 2, 4, 6, 8]


def test_samplers_of_lightning_deal_to_the_rank_and_then_to_this_one_again() -> None:
    engine = Numbered()
    own = [sharded(), DataLoader(Part(engine), batch_size=None)]

    def make() -> Any:
        return {"a": DataLoader([0]), "b": DataLoader(Part(engine), batch_size=None)}  # type: ignore[arg-type]

    sources = StreamSources(engine, own, partial(CombinedBatches, mode="min_size"), make, shards=True)
    assert read(sources, 1, 3) == [[1, 1], [4, 4], [7, 7]]
    assert read(sources, 0, 2) == [[0, 0], [2, 2], [4, 4], [6, 6], [8, 8]]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_workers_draw_as_those_of_the_rank_even_if_others_persist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    engine = Numbered()
    loader: Any = DataLoader(Part(engine), batch_size=None, num_workers=1, persistent_workers=True)
    sources = StreamSources(engine, [loader], lambda loaders: loaders[0], None, shards=True)
    sources._number(loader, 0, 2)
    read(sources, 0, 2)
    before = loader._iterator
    read(sources, 2, 3)
    assert loader._iterator is not before
    start: Any = start_of_workers(loader)
    assert start.keywords == {"rank": 2}
    loader._iterator._shutdown_workers()
