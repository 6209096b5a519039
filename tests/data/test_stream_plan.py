"""The positions of the streams of a job, through commits and deaths."""

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ft.data.stream_plan import StreamPlan


def test_tickets_are_unique_and_tell_slot_and_position() -> None:
    plan = StreamPlan(3)
    assert plan.take([0, 1, 2]) == {0: 0, 1: 1, 2: 2}
    assert plan.commit([0, 1, 2]) == {0: [0], 1: [1], 2: [2]}
    assert plan.take([2]) == {2: 5}
    assert plan.commit([0, 1, 2]) == {0: [], 1: [], 2: [5]}
    assert [plan.position(slot) for slot in range(3)] == [1, 1, 2]


def test_what_a_dead_slot_had_in_flight_is_read_again() -> None:
    plan = StreamPlan(2)
    for _ in range(3):  # a window of accumulation
        plan.take([0, 1])
    assert plan.commit([0]) == {0: [0, 2, 4]}
    assert plan.position(1) == 0
    assert plan.take([0, 1]) == {0: 6, 1: 1}


def test_a_cap_counts_what_is_in_flight() -> None:
    plan = StreamPlan(2)
    assert plan.num_left(0, None) == math.inf
    plan.take([0])
    assert plan.num_left(0, 3) == 2
    assert plan.num_left(1, 0) == 0


def test_another_plan_continues_after_what_was_committed() -> None:
    plan = StreamPlan(2)
    plan.begin_epoch(4)
    assert plan.is_untouched
    plan.take([0, 1])
    plan.commit([0, 1])
    plan.take([1])
    other = StreamPlan(2)
    other.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert other.epoch == 4
    assert not other.is_untouched
    assert other.take([0, 1]) == {0: 2, 1: 3}


class Job:
    """The plans of the live slots of a job whose streams have ``lengths``."""

    def __init__(self, lengths: list[int], num_slots: int, window: int, state: dict[str, Any] | None) -> None:
        self.lengths, self.num_slots, self.window = lengths, num_slots, window
        self.plans = {slot: StreamPlan(num_slots) for slot in range(num_slots)}
        for plan in self.plans.values() if state is not None else ():
            plan.load_state_dict(state)
            plan.deal()

    def left(self, slot: int) -> int:
        plan = self.plans[slot]
        stream = plan.stream_of(slot)
        return 0 if stream is None else self.lengths[stream] - plan.position(stream)

    def step(self, deaths: list[tuple[int, int]]) -> list[int]:
        """Return the tickets that are done in a window in which slots die, each before some batch of it or the commit."""
        live = sorted(self.plans)
        for batch in range(self.window + 1):
            for when, who in deaths:
                if min(when, self.window) == batch and len(live) > 1:
                    del self.plans[live.pop(who % len(live))]
            if batch == self.window:
                break
            while idle := [slot for slot in live if not self.left(slot)]:
                found = [plan.hand_over(idle, live, of_absent=True) for plan in self.plans.values()]
                assert all(streams == found[0] for streams in found)
                if not found[0]:
                    break
            having = [slot for slot in live if self.left(slot)]
            taken = [plan.take(having) for plan in self.plans.values()]
            assert all(tickets == taken[0] for tickets in taken)
        ended = [slot for slot in live if not self.left(slot)]
        done = [plan.commit(live, ended) for plan in self.plans.values()]
        assert all(tickets == done[0] for tickets in done)
        return [ticket for tickets in done[0].values() for ticket in tickets]

    def join(self, slot: int) -> None:
        slot %= self.num_slots
        if slot not in self.plans:
            state = self.state()
            self.plans[slot] = StreamPlan(self.num_slots)
            self.plans[slot].load_state_dict(json.loads(json.dumps(state)))

    def state(self) -> dict[str, Any]:
        states = [plan.state_dict() for plan in self.plans.values()]
        assert all(state["done"] == states[0]["done"] and state["over"] == states[0]["over"] for state in states)
        return states[0]


death = st.tuples(st.just("death"), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=2))
event = st.one_of(death, st.tuples(st.just("join"), st.integers(0, 4)), st.just(("step", [])))
phase = st.tuples(st.integers(1, 5), st.integers(1, 3), st.lists(event, max_size=8))
# Often short, so that slots go from one stream to the next within a window, in which they may die, too.
some = st.one_of(st.integers(1, 3), st.integers(0, 9))


@given(
    lengths=st.lists(some, min_size=1, max_size=6),
    first=st.lists(event, max_size=2),
    phases=st.lists(phase, min_size=1, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_every_batch_is_trained_once_whoever_dies_joins_and_resumes(
    lengths: list[int], first: list[tuple[str, Any]], phases: list[tuple[int, int, list[tuple[str, Any]]]]
) -> None:
    trained: list[int] = []
    state = None
    for num_slots, window, events in [(len(lengths), 1, first), *phases]:
        job = Job(lengths, num_slots, window, state)
        for kind, argument in events:
            if kind == "join":
                job.join(argument)
            else:
                trained += job.step(argument)
        state = job.state()
    for _ in range(sum(lengths) + 1):
        trained += job.step([])
    expected = [index * len(lengths) + stream for stream, length in enumerate(lengths) for index in range(length)]
    assert sorted(trained) == sorted(expected)
    assert job.state()["over"] == [*range(len(lengths))]
