"""The stream loaders of all slots of a job, in one thread each."""

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ft.data.random_state import random_state, under_random_state
from lightning_ft.data.stream_plan import StreamPlan
from lightning_ft.data.stream_reader import Stream
from lightning_ft.data.streams import StreamLoader


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Endless:
    """Yields the numbers of its slot, and counts how many were asked for."""

    def __init__(self, numbers: Iterable[Any]) -> None:
        self.numbers = numbers
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            self.num_read += 1
            yield number


class Stateful(Endless):
    """Knows where it is."""

    first = position = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for index, number in list(enumerate(self.numbers))[first:]:
            self.position = index + 1
            self.num_read += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["position"]


class Kept:
    value: bytes | None = None

    def keep(self, value: bytes) -> None:
        self.value = value

    def recall(self) -> bytes | None:
        return self.value


class Job:
    """A loader for every slot, and the exchange between their threads."""

    def __init__(
        self,
        sources: list[Any],
        *,
        sized: bool = False,
        limit: int | float = 1.0,
        streams: dict[int, list[Any]] | None = None,
        takes_over: bool = False,
    ) -> None:
        """Make it; ``streams`` are those of jobs of other numbers of slots."""
        self.epoch = 0
        self.live = tuple(range(len(sources)))
        found = {len(sources): sources, **(streams or {})}
        self._barrier = Barrier(len(sources), timeout=20)
        self._rows: dict[int, bytes] = {}
        lengths = [len(source) for source in sources] if sized else None
        self.memories = [Kept() for _ in sources]
        self.loaders = [
            StreamLoader(
                source,
                slot,
                len(sources),
                lambda: self.epoch,
                self._exchange_as(slot),
                lengths,
                limit,
                find=lambda number, count: Stream(
                    found[count][number], memory=self.memories[number] if count == len(sources) else Kept()
                ),
                takes_over=takes_over,
                borrow=lambda batch, lender, slot=slot: self._lend(batch, lender, slot),
            )
            for slot, source in enumerate(sources)
        ]

    def _exchange_as(self, slot: int) -> Callable[[bytes], dict[int, bytes]]:
        def exchange(mine: bytes) -> dict[int, bytes]:
            self._barrier.wait()
            self._rows[slot] = mine
            self._barrier.wait()
            return dict(self._rows)

        return exchange

    def _lend(self, batch: Any, lender: int, slot: int) -> Any:
        self._barrier.wait()
        if slot == lender:
            self._lent = batch
        self._barrier.wait()
        return self._lent

    def train(self, num_steps: int = 1000) -> list[list[tuple[Any, bool, bool]]]:
        """Return of every slot its batches, whether they count and whether one was said to be the last."""
        live = self.live

        def run(loader: StreamLoader) -> list[tuple[Any, bool, bool]]:
            seen: list[tuple[Any, bool, bool]] = []
            while len(seen) < num_steps and (not seen or not seen[-1][2]):
                loader.begin_batch()
                batch = next(loader, None)
                if batch is None:
                    break
                loader.commit(live)
                seen.append((batch, loader.has_own_batch, loader.remaining_steps == 0))
            return seen

        # While torch makes an object of its generator's state, which the threads share, it holds a lock: a garbage
        # collection there may let another thread run, and this one wait for the lock with the interpreter's.
        gc.disable()
        try:
            with ThreadPoolExecutor(len(live)) as pool:
                return list(pool.map(run, [self.loaders[slot] for slot in live]))
        finally:
            gc.enable()

    def kill(self, slot: int) -> None:
        self.live = tuple(other for other in self.live if other != slot)
        self._barrier = Barrier(len(self.live), timeout=20)
        self._rows.pop(slot, None)

    def resume(self, states: list[dict[str, Any]]) -> None:
        """Go on where other loaders were, with what each of them adds about its own source."""
        sources = {own["stream"]: own for state in states if (own := state.pop("source", None)) is not None}
        for loader in self.loaders:
            loader.load_state_dict({**states[0], "split": True, "sources": sources})
            iter(loader)
            iter(loader)  # as Lightning does

    def states(self) -> list[dict[str, Any]]:
        return [self.loaders[slot].state_dict() | {"source": self.loaders[slot].source_state()} for slot in self.live]

    def train_epoch(self, epoch: int = 0, num_steps: int = 1000) -> list[list[tuple[Any, bool, bool]]]:
        self.epoch = epoch
        for loader in self.loaders:
            iter(loader)
        return self.train(num_steps)


def own(seen: list[tuple[Any, bool, bool]]) -> list[Any]:
    return [batch for batch, counts, _ in seen if counts]


@pytest.mark.parametrize("sized", [False, True])
def test_the_epoch_goes_on_until_all_streams_are_used_up(sized: bool) -> None:
    job = Job([[1, 2, 3], [11], [21, 22, 23, 24]], sized=sized)
    for epoch in range(2):
        seen = job.train_epoch(epoch)
        assert [own(ours) for ours in seen] == [[1, 2, 3], [11], [21, 22, 23, 24]]
        assert [[last for _, _, last in ours] for ours in seen] == [[False, False, False, True]] * 3


def test_a_rank_without_a_batch_repeats_its_last_one_as_it_was() -> None:
    job = Job([[[1]], [[11], [12], [13]]])
    iter(job.loaders[0]), iter(job.loaders[1])
    for batch, _, _ in job.train(1)[0]:
        batch.append("changed by the user's code")
    assert [batch for batch, _, _ in job.train()[0]] == [[1], [1]]


@pytest.mark.parametrize(("sized", "limit", "expected"), [(True, 0.5, [2, 1]), (True, 3, [3, 2]), (False, 3, [3, 2])])
def test_the_limit_counts_batches_of_a_rank(sized: bool, limit: int | float, expected: list[int]) -> None:
    sources = [[1, 2, 3, 4], [11, 12]] if sized else [Endless([1, 2, 3, 4]), Endless([11, 12])]
    job = Job(sources, sized=sized, limit=limit)
    assert [len(own(ours)) for ours in job.train_epoch()] == expected
    assert sized or sources[0].num_read == 3  # type: ignore[union-attr]
    assert job.loaders[0].expected_steps == (2 if limit == 0.5 else 3)


def test_a_stream_with_a_length_is_not_read_ahead() -> None:
    class Sized(Endless):
        def __len__(self) -> int:
            return 3

    source = Sized([1, 2, 3])
    job = Job([source, [11, 12, 13]], sized=True)
    job.train_epoch(num_steps=2)
    assert source.num_read == 2


def test_streams_that_end_before_their_length_says_end_the_epoch_with_a_step_that_does_not_count() -> None:
    class Liar(Endless):
        def __len__(self) -> int:
            return 5

    seen = Job([Liar([1, 2]), Liar([11])], sized=True).train_epoch()
    assert [own(ours) for ours in seen] == [[1, 2], [11]]
    assert [[last for _, _, last in ours] for ours in seen] == [[False, False, True]] * 2


def test_batches_that_are_none_count_as_trained_and_others_stand_in() -> None:
    job = Job([[None, 2, None, 4], [11, None, 13]])
    seen = job.train_epoch()
    assert [[batch for batch, _, _ in ours] for ours in seen] == [[2, 2, 2, 4], [11, 11, 13, 13]]
    assert [own(ours) for ours in seen] == [[2, 4], [11, 13]]
    assert job.loaders[0].plan.position(0) == 4


def test_no_data_anywhere_is_an_empty_epoch_and_a_rank_without_any_borrows_a_batch() -> None:
    assert Job([Endless([]), Endless([])]).train_epoch() == [[], []]
    job = Job([Endless([]), Endless([None, None]), Endless([21, 22])])
    for epoch in range(2):
        nothing, none, both = job.train_epoch(epoch)
        assert own(both) == [21, 22]
        for seen in (nothing, none):
            assert own(seen) == []
            assert [batch for batch, _, _ in seen] == [21, 21]


def test_what_a_missing_slot_leaves_is_known_as_far_as_its_length_is() -> None:
    for sized, left in ((True, {1: 1, 2: 1}), (False, {1: None, 2: None})):
        job = Job([[1, 2, 3, 4], [11, 12, 13], [21, 22, 23], [31]], sized=sized)
        job.train_epoch(num_steps=2)
        assert job.loaders[0].left_by([1, 2, 3]) == left


def test_nothing_is_taken_before_a_batch_boundary() -> None:
    loader = Job([[1, 2]]).loaders[0]
    iter(loader)
    assert next(loader, "nothing") == "nothing"
    loader.begin_batch()
    assert next(loader) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_another_loader_continues_a_shuffled_stream_where_one_was(workers: int) -> None:
    def make_job() -> Job:
        return Job([DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers) for _ in range(2)])

    torch.manual_seed(5)
    job = make_job()
    first = [own(ours) for ours in job.train_epoch(num_steps=3)]
    states = [loader.state_dict() for loader in job.loaders]
    torch.manual_seed(6)
    other = make_job()
    for loader, state in zip(other.loaders, states, strict=True):
        loader.load_state_dict(state)
    before = random_state()
    rest = [own(ours) for ours in other.train_epoch()]
    assert str(random_state()) == str(before)
    for ours, theirs in zip(first, rest, strict=True):
        assert sorted(torch.cat([*ours, *theirs]).tolist()) == list(range(20))
    for loader in (*job.loaders, *other.loaders):
        loader.close()


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_source_with_a_state_is_put_to_its_last_committed_position_without_reading(is_behind: bool) -> None:
    numbers = [[*range(10)], [*range(10, 17)]]
    job = Job([Stateful(values) for values in numbers])
    job.train_epoch(epoch=0)
    job.train_epoch(epoch=1, num_steps=3)
    states = [loader.state_dict() for loader in job.loaders]
    if is_behind:  # what it committed last, nobody else learned of
        job.train(1)
    sources = [Stateful(values) for values in numbers]
    other = Job(sources)
    other.epoch = 1
    for mine, theirs in zip(other.memories, job.memories, strict=True):
        mine.value = theirs.value
    for loader, state in zip(other.loaders, states, strict=True):
        loader.load_handed_out(state, (0, 1))
    assert [own(seen) for seen in other.train()] == [values[3:] for values in numbers]
    assert [source.num_read for source in sources] == [7, 4]


def test_attributes_of_the_source_are_readable() -> None:
    loader = Job([DataLoader(Numbers(), batch_size=4)]).loaders[0]
    assert loader.batch_size == 4
    assert len(loader.dataset) == 20
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        loader.nothing_of_this_name  # noqa: B018
    with pytest.raises(TypeError, match="`DataLoader` has no length on every rank"):
        len(loader)


def test_random_numbers_are_drawn_from_a_state_and_training_goes_on_as_before() -> None:
    state = random_state()
    drawn = torch.rand(1).item(), random.random()
    with under_random_state(state):
        assert (torch.rand(1).item(), random.random()) == drawn
    following = torch.rand(1).item()
    with under_random_state(state):
        torch.rand(2)
        assert torch.rand(1).item() != following


def all_of(seen: list[list[tuple[Any, bool, bool]]]) -> list[Any]:
    return [batch for ours in seen for batch in own(ours)]


def numbers_of(*counts: int) -> list[list[int]]:
    return [[100 * slot + number for number in range(count)] for slot, count in enumerate(counts)]


@pytest.mark.parametrize("source", [Endless, Stateful])
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1), (4, 2)])
def test_another_number_of_slots_trains_what_was_left_of_every_stream(
    before: int, after: int, sized: bool, source: Any
) -> None:
    kind = list if sized else source
    old, new = numbers_of(7, 3, 5, 9)[:before], numbers_of(5, 4, 6)[:after]
    first = Job([kind(numbers) for numbers in old], sized=sized)
    trained = all_of(first.train_epoch(num_steps=2))
    streams = [kind(numbers) for numbers in old]
    second = Job([kind(numbers) for numbers in new], sized=sized, streams={before: streams})
    second.resume(first.states())
    trained += all_of(second.train(2))
    # Interrupted once more, and back to as many slots as at first.
    third = Job([kind(numbers) for numbers in old], sized=sized, streams={after: new, before: streams})
    third.resume(second.states())
    seen = third.train()
    assert sorted(trained + all_of(seen)) == sorted(chain.from_iterable(old))
    assert {ours[-1][2] for ours in seen} == {True}, "the last batch is known to be it"
    if source is Stateful and not sized and before == 3:
        assert streams[0].num_read < 7 + 7 - 2, "not from its start"
    for seen in (second.train_epoch(1), third.train_epoch(2)):
        assert [own(ours) for ours in seen] in (new, old)


@pytest.mark.parametrize("sized", [False, True])
def test_what_a_dead_slot_has_left_is_read_by_those_that_are_through(sized: bool) -> None:
    kind = list if sized else Endless
    streams = numbers_of(3, 9, 2, 5)
    job = Job([kind(numbers) for numbers in streams], sized=sized, takes_over=True)
    told: list[dict[int, int]] = []
    job.loaders[0].on_hand_over = told.append
    trained = all_of(job.train_epoch(num_steps=2))
    job.kill(1)
    trained += all_of(job.train(2))
    job.kill(2)  # which reads the stream of the first one
    seen = job.train()
    assert sorted(trained + all_of(seen)) == sorted(chain.from_iterable(streams))
    assert [ours[-1][2] for ours in seen] == [True, True]
    assert told == [{2: 1}, {0: 1}]
    assert sorted(all_of(job.train_epoch(1))) == sorted(chain.from_iterable(streams))


def test_a_window_that_a_dead_slot_began_is_read_by_another_from_its_beginning() -> None:
    plan = StreamPlan(2)
    plan.take([0, 1]), plan.take([0, 1])
    assert plan.hand_over([0], live=[0], of_absent=False) == {}
    assert plan.hand_over([0], live=[0], of_absent=True) == {0: 1}
    assert plan.take([0]) == {0: 1}
    assert plan.commit([0], ended=[0]) == {0: [0, 2, 1]}
    assert plan.is_over(0)
    assert plan.is_over(1)
    assert plan.hand_over([0], live=[0], of_absent=True) == {}


def test_who_left_a_stream_and_dies_before_the_commit_leaves_it_to_others() -> None:
    plan = StreamPlan(2)
    plan.load_state_dict({**StreamPlan(3).state_dict(), "done": [2, 5, 1]})
    plan.take([0, 1])
    assert plan.hand_over([0, 1], live=[0, 1], of_absent=False) == {0: 2}
    plan.take([0])
    assert plan.commit([1], ended=[1]) == {1: [16]}
    assert plan.without_reader([1], of_absent=False) == [0]
    assert plan.hand_over([1], live=[1], of_absent=True) == {1: 0}
    assert plan.position(0) == 2


class Continuing(Stateful):
    """Begins wherever it is, and anew only once it was at its end."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers[self.position :]:
            self.position += 1
            yield number
        self.position = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("source", [Stateful, Continuing])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("is_known", [False, True])
def test_sources_with_a_state_go_back_in_the_same_process(source: Any, epoch: int, num_steps: int, is_known: bool) -> None:
    streams = numbers_of(9, 4, 6)
    job = Job([source(numbers) for numbers in streams])
    for earlier in range(epoch):
        job.train_epoch(earlier)
    first = job.train_epoch(epoch, num_steps)
    states, known = job.states(), [loader.source_states() for loader in job.loaders]
    sources = {stream: own for of_rank in known for stream, own in of_rank.items()} if is_known else {}
    job.train(5)
    for loader, state in zip(job.loaders, states, strict=True):
        loader.load_handed_out({**state, "sources": sources}, job.live)
    again = [loader.source_states() for loader in job.loaders]
    assert again == [sources] * 3, "who has not read on knows of all"
    rest = job.train()
    assert [own(before) + own(after) for before, after in zip(first, rest, strict=True)] == streams
    assert [own(ours) for ours in job.train_epoch(epoch + 1)] == streams


def test_a_source_that_another_fit_read_begins_anew_after_a_way_back() -> None:
    sources = [Stateful(numbers) for numbers in numbers_of(5, 3)]
    Job(sources).train_epoch()
    job = Job(sources)
    job.train_epoch(num_steps=0)
    states = job.states()
    job.train(2)
    for loader, state in zip(job.loaders, states, strict=True):
        loader.load_handed_out(state, job.live)
    assert [own(ours) for ours in job.train()] == numbers_of(5, 3)
