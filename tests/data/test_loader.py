"""The loaders of all slots of a job in one process, against what ``DistributedSampler`` gives to the same ranks."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_ft.data.loader import ElasticLoader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return int(index)


class Job:
    """A loader for every slot, and the agreement that rank 0 would broadcast."""

    def __init__(self, num_slots: int, make_source: Callable[[int], DataLoader[Any]], **options: Any) -> None:
        self.epoch = 0
        self._drawn: dict[int, Tensor] = {}
        self.loaders = [
            ElasticLoader(make_source(slot), slot, num_slots, lambda: self.epoch, self._agree, **options)
            for slot in range(num_slots)
        ]

    def _agree(self, draw: Callable[[], Tensor]) -> Tensor:
        return self._drawn.setdefault(self.epoch, draw())  # the first to ask stands for rank 0

    def train(self, epoch: int = 0, death: tuple[int, int] | None = None) -> dict[int, list[Any]]:
        """Return the batches that each slot contributes; ``death`` is (slot, step in which it dies)."""
        self.epoch = epoch
        live = dict(enumerate(self.loaders))
        iterators = {slot: iter(loader) for slot, loader in live.items()}
        batches: dict[int, list[Any]] = {slot: [] for slot in live}
        step = 0
        while True:
            taken = {slot: next(iterators[slot], None) for slot in live}
            if all(batch is None for batch in taken.values()):
                return batches
            assert all(batch is not None for batch in taken.values())
            tickets = {slot: live[slot].ticket for slot in live}
            if death is not None and step == death[1]:
                del live[death[0]]
            for slot, loader in live.items():
                loader.commit(tuple(live))
                if tickets[slot] is not None:
                    batches[slot].append(as_list(taken[slot]))
            step += 1


def as_list(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, Tensor) else batch


def distributed(dataset: Dataset[int], num_slots: int, slot: int, **options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(dataset, num_replicas=num_slots, rank=slot, seed=3, **options)


def stock_batches(num_samples: int, num_slots: int, epoch: int, batch_size: int) -> dict[int, list[Any]]:
    batches: dict[int, list[Any]] = {}
    for slot in range(num_slots):
        sampler = distributed(Numbers(num_samples), num_slots, slot)
        sampler.set_epoch(epoch)
        loader = DataLoader(Numbers(num_samples), batch_size=batch_size, sampler=sampler)
        batches[slot] = [as_list(batch) for batch in loader]
    return batches


def make_job(num_samples: int, num_slots: int, *, limit: int | float = 1.0, **loader: Any) -> Job:
    def make_source(slot: int) -> DataLoader[Any]:
        dataset = Numbers(num_samples)
        return DataLoader(dataset, sampler=distributed(dataset, num_slots, slot), **{"batch_size": 3, **loader})

    return Job(num_slots, make_source, limit=limit)


def samples_of(batches: dict[int, list[Any]]) -> Counter[int]:
    return Counter(sample for ours in batches.values() for batch in ours for sample in batch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_without_faults_each_slot_gets_the_batches_of_distributed_sampler(num_slots: int, workers: int) -> None:
    job = make_job(36, num_slots, num_workers=workers)
    for epoch in range(2):
        assert job.train(epoch) == stock_batches(36, num_slots, epoch, batch_size=3)
    assert len(job.loaders[0]) == 12 // num_slots


@pytest.mark.parametrize("num_samples", [1, 2, 7, 35, 37])
def test_samples_that_cannot_be_dealt_evenly_are_not_repeated(num_samples: int) -> None:
    job = make_job(num_samples, 3)
    assert samples_of(job.train()) == Counter(range(num_samples))


@pytest.mark.parametrize(("num_samples", "last"), [(31, [2, 2]), (32, [3, 2]), (33, [2, 2, 2]), (29, [1, 1])])
def test_no_slot_is_left_with_one_sample_where_repetition_would_give_it_two(num_samples: int, last: list[int]) -> None:
    batches = make_job(num_samples, 3).train()
    assert samples_of(batches) == Counter(range(num_samples))
    lengths = sorted((len(batch) for ours in batches.values() for batch in ours), reverse=True)
    assert lengths == sorted([3] * (3 * (num_samples // 9)) + last, reverse=True)


def test_drop_last_drops_the_incomplete_batch_of_each_slot_only() -> None:
    batches = make_job(38, 3, drop_last=True).train()
    assert all(len(batch) == 3 for ours in batches.values() for batch in ours)
    assert {slot: len(ours) for slot, ours in batches.items()} == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (0.5, 2), (1.0, 4), (100, 4)])
def test_the_limit_counts_batches_of_a_rank(limit: int | float, steps: int) -> None:
    batches = make_job(36, 3, limit=limit).train()
    expected = stock_batches(36, 3, 0, batch_size=3)
    assert batches == {slot: ours[:steps] for slot, ours in expected.items()}


def test_without_automatic_batching_each_sample_is_a_batch() -> None:
    batches = make_job(12, 3, batch_size=None).train()
    assert Counter(sample for ours in batches.values() for sample in ours) == Counter(range(12))
    assert batches == stock_batches(12, 3, 0, batch_size=None)  # type: ignore[arg-type]


class Buckets(Sampler[list[int]]):
    """Batches of uneven size, in another order each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return len(self._bounds()) - 1

    def _bounds(self) -> list[int]:
        return [*range(0, self.count, 5), self.count]

    def __iter__(self) -> Iterator[list[int]]:
        bounds = self._bounds()
        order = torch.randperm(self.count).tolist()
        return iter([order[begin:end] for begin, end in pairwise(bounds)])


def test_batches_of_a_batch_sampler_of_ones_own_are_dealt_whole() -> None:
    job = Job(2, lambda slot: DataLoader(Numbers(23), batch_sampler=Buckets(23)))
    for epoch in range(2):
        batches = job.train(epoch)
        assert samples_of(batches) == Counter(range(23))
        assert sorted(len(batch) for ours in batches.values() for batch in ours) == [3, 5, 5, 5, 5]


class PairsByLength(BatchSampler):
    """A batch sampler over somebody else's sampler, with random numbers of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[index] for index in torch.randperm(len(batches)).tolist()])


@pytest.mark.parametrize("num_samples", [24, 23])
def test_a_batch_sampler_over_a_distributed_sampler_makes_the_batches_of_each_rank(num_samples: int) -> None:
    def make_source(slot: int) -> DataLoader[Any]:
        dataset = Numbers(num_samples)
        return DataLoader(dataset, batch_sampler=PairsByLength(distributed(dataset, 2, slot), 4, drop_last=False))

    torch.manual_seed(3)
    job = Job(2, make_source)
    for epoch in range(2):
        torch.manual_seed(epoch)
        batches = job.train(epoch)
        assert samples_of(batches) == Counter(range(num_samples))
        if num_samples == 24:
            for slot, ours in batches.items():
                torch.manual_seed(epoch)  # as all ranks have it
                loader = make_source(slot)
                loader.batch_sampler.sampler.set_epoch(epoch)  # type: ignore[union-attr]
                assert ours == [as_list(batch) for batch in loader]


def test_weights_are_drawn_once_for_all_ranks() -> None:
    weights = [0.0] * 10 + [1.0] * 10

    def make_source(slot: int) -> DataLoader[Any]:
        sampler = WeightedRandomSampler(weights, num_samples=24)
        return DataLoader(Numbers(20), batch_size=4, sampler=sampler)

    job = Job(2, make_source)
    batches = job.train()
    order = job._drawn[0].tolist()
    assert len(order) == 24
    assert min(order) >= 10
    assert samples_of(batches) == Counter(order)
    assert batches[0][0] == order[0:8:2]


def test_a_sampler_whose_length_is_wrong_is_an_error_that_names_it() -> None:
    class Liar(SequentialSampler):
        def __len__(self) -> int:
            return 30

    job = Job(2, lambda slot: DataLoader(Numbers(20), batch_size=4, sampler=Liar(Numbers(20))))
    with pytest.raises(ValueError, match=r"`Liar` yielded 20 items in epoch 0, but its `__len__` said 30"):
        job.train()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [0, 3, 5])
def test_what_a_dead_slot_leaves_is_trained_by_the_others_in_the_same_epoch(step: int, workers: int) -> None:
    job = make_job(60, 3, num_workers=workers, batch_size=2)
    batches = job.train(death=(1, step))
    assert samples_of(batches) == Counter(range(60))
    assert len(batches[1]) == step


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_continues_where_another_was(workers: int) -> None:
    undisturbed = make_job(36, 2, num_workers=workers).train()
    job = make_job(36, 2, num_workers=workers)
    iterators = [iter(loader) for loader in job.loaders]
    for _ in range(3):
        for iterator in iterators:
            next(iterator)
        for loader in job.loaders:
            loader.commit((0, 1))
    resumed = make_job(36, 2, num_workers=workers)
    for loader in resumed.loaders:
        loader.load_state_dict(job.loaders[0].state_dict())
    assert resumed.train() == {slot: batches[3:] for slot, batches in undisturbed.items()}


def test_a_loader_that_resumes_at_the_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    job = make_job(36, 2)
    job.train()
    resumed = make_job(36, 2)
    for loader in resumed.loaders:
        loader.load_state_dict(job.loaders[0].state_dict())
    for loader in resumed.loaders:
        iter(loader)
    resumed.epoch = 1  # Lightning finds out only now
    first = [next(loader) for loader in resumed.loaders]
    assert [as_list(batch) for batch in first] == [ours[0] for ours in stock_batches(36, 2, 1, batch_size=3).values()]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_as_soon_as_what_they_read_is_given_up(persistent: bool) -> None:
    source = DataLoader(Numbers(36), batch_size=2, num_workers=1, persistent_workers=persistent)
    with closing(ElasticLoader(source, 0, 1, lambda: 0, lambda draw: draw())) as loader:
        next(iter(loader))
        held = loader._batches  # as by a cycle that was not collected yet
        (worker,) = held._workers
        next(iter(loader))
        assert worker.is_alive() == persistent
        held = loader._batches
    assert not held._workers[0].is_alive()
