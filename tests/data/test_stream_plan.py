"""The positions of the streams of a job, through commits and deaths."""

import json
import math

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
