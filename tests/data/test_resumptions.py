"""Every sample of an epoch is trained once, whoever dies, joins and resumes on however many slots in the middle of it."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ft.data.loader import ElasticLoader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return int(index)


class Job:
    """The loaders of the live slots of one job, in one process."""

    def __init__(
        self, num_samples: int, num_slots: int, drop_last: bool, workers: int = 0, *, persistent: bool = False
    ) -> None:
        self.options = {"batch_size": 3, "drop_last": drop_last, "num_workers": workers}
        self.options["persistent_workers"] = persistent and workers > 0
        self.num_samples = num_samples
        self.num_slots = num_slots
        self.epoch = 1
        self.loaders = {slot: self.make(slot) for slot in range(num_slots)}

    def make(self, slot: int) -> ElasticLoader:
        data = Numbers(self.num_samples)
        sampler = DistributedSampler(data, num_replicas=self.num_slots, rank=slot, seed=3)
        source: Any = DataLoader(data, sampler=sampler, **self.options)
        return ElasticLoader(source, slot, self.num_slots, lambda: self.epoch, lambda draw: draw())

    def begin(self, state: Any = None) -> None:
        for loader in self.loaders.values():
            if state is not None:
                loader.load_state_dict(state)
            iter(loader)

    def state(self) -> Any:
        states = [loader.state_dict() for loader in self.loaders.values()]
        assert all(state == states[0] for state in states)
        return states[0]

    def step(self, dies: int | None = None) -> list[int] | None:
        """Return what is trained in a step in which a slot may die, or None if the epoch is over."""
        taken = {slot: next(loader, None) for slot, loader in self.loaders.items()}
        if any(batch is None for batch in taken.values()):
            assert all(batch is None for batch in taken.values())
            return None
        if dies is not None and len(self.loaders) > 1:
            self.loaders.pop(sorted(self.loaders)[dies % len(self.loaders)]).close()
        live = tuple(sorted(self.loaders))
        own = {slot: loader.has_own_batch for slot, loader in self.loaders.items()}
        for loader in self.loaders.values():
            loader.commit(live)
        return [sample for slot in live if own[slot] for sample in torch.as_tensor(taken[slot]).tolist()]

    def join(self, slot: int) -> None:
        slot %= self.num_slots
        if slot in self.loaders:
            return
        state = self.state()
        for loader in self.loaders.values():
            loader.admit([slot])
        self.loaders[slot] = self.make(slot)
        self.loaders[slot].load_handed_out(state, tuple(sorted(self.loaders)))

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()

    def finish(self) -> list[int]:
        trained: list[int] = []
        while (samples := self.step()) is not None:
            trained += samples
        return trained


def undisturbed(num_samples: int, num_slots: int, drop_last: bool, epoch: int = 1) -> Counter[int]:
    job = Job(num_samples, num_slots, drop_last)
    job.epoch = epoch
    job.begin()
    return Counter(job.finish())


event = st.one_of(st.just(("step", 0)), st.tuples(st.sampled_from(["death", "join"]), st.integers(0, 4)))
phase = st.tuples(st.integers(1, 5), st.lists(event, max_size=8))


@given(num_samples=st.integers(1, 60), drop_last=st.booleans(), phases=st.lists(phase, min_size=1, max_size=4))
@settings(max_examples=60)
def test_every_sample_is_trained_once_across_deaths_rejoins_and_resumptions(
    num_samples: int, drop_last: bool, phases: list[tuple[int, list[tuple[str, int]]]]
) -> None:
    trained: list[int] = []
    state = None
    for num_slots, events in phases:
        job = Job(num_samples, num_slots, drop_last)
        job.begin(state)
        for kind, slot in events:
            if kind == "join":
                job.join(slot)
            else:
                trained += job.step(slot if kind == "death" else None) or []
        state = job.state()
    trained += job.finish()
    assert Counter(trained) == undisturbed(num_samples, phases[0][0], drop_last)
    job.epoch = 2
    for loader in job.loaders.values():
        iter(loader)
    assert Counter(job.finish()) == undisturbed(num_samples, phases[-1][0], drop_last, epoch=2)


@given(
    num_samples=st.integers(10, 40),
    phases=st.lists(st.tuples(phase, st.sampled_from([0, 1, 2]), st.booleans()), min_size=2, max_size=3),
)
@settings(max_examples=5, deadline=None)
def test_any_number_of_workers_follows_to_another_number_of_slots(
    num_samples: int, phases: list[tuple[tuple[int, list[tuple[str, int]]], int, bool]]
) -> None:
    trained: list[int] = []
    state = None
    jobs: list[Job] = []
    for (num_slots, events), workers, persistent in phases:
        for job in jobs[-1:]:
            job.close()
        job = Job(num_samples, min(3, num_slots), drop_last=False, workers=workers, persistent=persistent)
        jobs.append(job)
        job.begin(state)
        for kind, slot in events:
            if kind == "join":
                job.join(slot)
            else:
                trained += job.step(slot if kind == "death" else None) or []
        state = job.state()
    trained += job.finish()
    assert Counter(trained) == Counter(range(num_samples))
    job.epoch = 2
    for loader in job.loaders.values():
        iter(loader)
    assert Counter(job.finish()) == Counter(range(num_samples))
    job.close()
