import json
import time
from collections.abc import Callable
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft.data.tickets import TicketPlan

Call = tuple[str, object]


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, int, list[Call]]:
    """A plan's size and what happens to it: micro-batches and steps, with deaths and joins anywhere in between."""
    num_slots = draw(st.integers(1, 6))
    num_tickets = draw(st.integers(0, 60))
    live = set(draw(st.sets(st.integers(0, num_slots - 1), min_size=1)))
    calls: list[Call] = []
    kinds = st.sampled_from(["take", "take", "take", "commit", "commit", "remove", "add"])
    for kind in draw(st.lists(kinds, max_size=60)):
        if kind == "take":
            calls.append(("take", sorted(live)))
        elif kind == "commit":
            calls.append(("commit", draw(st.sets(st.sampled_from(sorted(live))))))
        elif kind == "remove" and len(live) > 1:
            slot = draw(st.sampled_from(sorted(live)))
            live.remove(slot)
            if draw(st.booleans()):  # otherwise the next take has to notice
                calls.append(("remove", slot))
        elif kind == "add":
            # Also slots that round 0 does not know, and live ones: a respawn faster than the news of the death.
            slot = draw(st.integers(0, num_slots + 1))
            live.add(slot)
            calls.append(("add", slot))
    calls.append(("live", sorted(live)))
    return num_tickets, num_slots, calls


def play(plan: TicketPlan, call: Call) -> object:
    kind, argument = call
    return None if kind == "live" else getattr(plan, kind)(argument)


def finish(plan: TicketPlan, live: list[int], window: int) -> list[int]:
    """Train the rest of the epoch without faults; check the promised number of steps on the way."""
    done: list[int] = []
    promised = plan.remaining_steps(live)
    num_steps = 0
    while plan.take(live):
        num_steps += 1
        assert plan.remaining_steps(live) == promised - num_steps
        if num_steps % window == 0:
            done += chain.from_iterable(plan.commit(live).values())
    done += chain.from_iterable(plan.commit(live).values())
    assert num_steps == promised
    return done


@given(stories(), st.integers(1, 3))
def test_every_ticket_is_committed_exactly_once_whoever_dies_or_joins(
    story: tuple[int, int, list[Call]], window: int
) -> None:
    num_tickets, num_slots, calls = story
    plan = TicketPlan(num_tickets, num_slots)
    done: list[int] = []
    for call in calls:
        result = play(plan, call)
        if call[0] == "commit":
            assert isinstance(result, dict)
            done += chain.from_iterable(result.values())
        in_flight = chain.from_iterable(plan.in_flight.values())
        assert sorted([*done, *in_flight, *plan.open_tickets()]) == list(range(num_tickets))
        assert plan.num_open == sum(1 for _ in plan.open_tickets())
    live = calls[-1][1]
    assert isinstance(live, list)
    done += finish(plan, live, window)
    assert sorted(done) == list(range(num_tickets))
    assert plan.num_open == 0


@given(stories(), st.data())
def test_a_plan_restored_at_any_moment_continues_identically(
    story: tuple[int, int, list[Call]], data: st.DataObject
) -> None:
    num_tickets, num_slots, calls = story
    plan = TicketPlan(num_tickets, num_slots)
    moment = data.draw(st.integers(0, len(calls)))
    for call in calls[:moment]:
        play(plan, call)
    state = json.loads(json.dumps(plan.state_dict()))
    restored = TicketPlan(num_tickets, num_slots)
    restored.load_state_dict(state)
    for call in calls[moment:]:
        assert play(restored, call) == play(plan, call)
        assert restored.state_dict() == plan.state_dict()
        assert restored.in_flight == plan.in_flight
    live = calls[-1][1]
    assert isinstance(live, list)
    assert finish(restored, live, 1) == finish(plan, live, 1)


@given(stories())
def test_plans_driven_by_the_same_calls_stay_equal(story: tuple[int, int, list[Call]]) -> None:
    num_tickets, num_slots, calls = story
    plans = [TicketPlan(num_tickets, num_slots) for _ in range(2)]
    for call in calls:
        first, second = (play(plan, call) for plan in plans)
        assert first == second
        assert plans[0].state_dict() == plans[1].state_dict()


@given(stories())
def test_what_a_slot_takes_is_what_was_upcoming_unless_a_new_round_began(story: tuple[int, int, list[Call]]) -> None:
    num_tickets, num_slots, calls = story
    plan = TicketPlan(num_tickets, num_slots)
    for kind, argument in calls:
        if kind == "take":
            assert isinstance(argument, list)
            plan.take(argument)  # tickets of the dead return here, not below
            upcoming = {slot: next(plan.upcoming(slot), None) for slot in argument}
            before = plan.round
            taken = plan.take(argument)
            if plan.round == before and taken:
                assert taken == upcoming
        else:
            play(plan, (kind, argument))


@given(st.integers(1, 8), st.integers(0, 100))
def test_without_faults_a_slot_gets_every_rth_ticket_in_one_round(num_slots: int, num_tickets: int) -> None:
    plan = TicketPlan(num_tickets, num_slots)
    live = list(range(num_slots))
    taken: dict[int, list[int]] = {slot: [] for slot in live}
    prefetched = {slot: list(plan.upcoming(slot)) for slot in live}
    num_steps = 0
    while tickets := plan.take(live):
        num_steps += 1
        assert plan.commit(live) == {slot: [] if ticket is None else [ticket] for slot, ticket in tickets.items()}
        for slot, ticket in tickets.items():
            taken[slot] += [] if ticket is None else [ticket]
    assert taken == prefetched == {slot: list(range(slot, num_tickets, num_slots)) for slot in live}
    assert num_steps == -(-num_tickets // num_slots)
    assert plan.round == 0


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 60), st.integers(0, 20))
def test_another_number_of_slots_trains_exactly_the_tickets_that_were_left(
    before: int, after: int, num_tickets: int, num_steps: int
) -> None:
    plan = TicketPlan(num_tickets, before)
    done: list[int] = []
    for _ in range(num_steps):
        plan.take(range(before))
        done += chain.from_iterable(plan.commit(range(before)).values())
    resumed = TicketPlan(num_tickets, after)
    resumed.load_state_dict(plan.state_dict())
    done += finish(resumed, list(range(after)), 1)
    assert sorted(done) == list(range(num_tickets))
    resumed.begin_epoch(1)
    assert list(resumed.upcoming(0)) == list(range(0, num_tickets, after))


def test_a_respawned_slot_continues_with_the_ticket_it_died_on() -> None:
    plan = TicketPlan(20, 3)
    plan.take([0, 1, 2])
    plan.commit([0, 1, 2])
    assert plan.take([0, 1, 2]) == {0: 3, 1: 4, 2: 5}
    plan.remove(1)
    assert plan.commit([0, 2]) == {0: [3], 2: [5]}
    assert plan.take([0, 2]) == {0: 6, 2: 8}
    plan.commit([0, 2])
    plan.add(1)
    assert plan.take([0, 1, 2]) == {0: 9, 1: 4, 2: 11}
    assert plan.round == 0


def test_a_respawn_faster_than_the_news_of_the_death_begins_with_the_ticket_in_flight() -> None:
    plan = TicketPlan(20, 2)
    plan.take([0, 1])
    plan.add(1)
    assert plan.commit([0, 1]) == {0: [0], 1: []}
    assert plan.take([0, 1]) == {0: 2, 1: 1}


def test_the_stream_of_a_dead_slot_is_dealt_out_when_the_live_ones_are_used_up() -> None:
    plan = TicketPlan(9, 3)
    taken = []
    while tickets := plan.take([0, 2]):
        taken.append(tickets)
        plan.commit([0, 2])
    assert taken == [{0: 0, 2: 2}, {0: 3, 2: 5}, {0: 6, 2: 8}, {0: 1, 2: 4}, {0: 7, 2: None}]
    assert plan.round == 1


def test_a_slot_unknown_to_the_round_joins_once_dealing_again_saves_a_step() -> None:
    plan = TicketPlan(12, 2)
    plan.take([0, 1])
    plan.add(5)
    assert plan.remaining_steps([0, 1, 5]) == 4
    tickets = plan.take([0, 1, 5])
    assert plan.round == 1
    assert None not in tickets.values()


def test_tickets_in_flight_across_a_new_round_return_when_their_slot_dies() -> None:
    plan = TicketPlan(6, 2)
    plan.take([0])
    plan.take([0])
    plan.take([0])
    assert plan.take([0, 7]) == {0: 1, 7: 3}
    assert plan.round == 1
    assert plan.in_flight == {0: [0, 2, 4, 1], 7: [3]}
    plan.remove(0)
    assert plan.commit([7]) == {7: [3]}
    assert sorted(plan.open_tickets()) == [0, 1, 2, 4, 5]
    assert sorted(finish(plan, [7], 2)) == [0, 1, 2, 4, 5]


def test_a_live_slot_that_did_not_contribute_is_not_sent_back_in_its_stream() -> None:
    plan = TicketPlan(8, 2)
    plan.take([0, 1])
    assert plan.commit([0]) == {0: [0]}
    assert plan.take([0, 1]) == {0: 2, 1: 3}
    plan.commit([0, 1])
    assert sorted(finish(plan, [0, 1], 1)) == [1, 4, 5, 6, 7]


def test_tickets_of_a_step_that_is_averaged_anew_without_their_slot_are_dealt_again() -> None:
    plan = TicketPlan(6, 2)
    plan.take([0, 1])
    assert plan.commit([0, 1]) == {0: [0], 1: [1]}
    plan.reopen([1])
    plan.remove(1)
    assert plan.remaining_steps([0]) == 5
    assert sorted(finish(plan, [0], 1)) == [1, 2, 3, 4, 5]


def test_beginning_an_epoch_forgets_the_one_before() -> None:
    plan = TicketPlan(4, 2)
    plan.take([0])
    plan.begin_epoch(3)
    assert plan.epoch == 3
    assert plan.in_flight == {}
    assert sorted(finish(plan, [0, 1], 1)) == [0, 1, 2, 3]


def test_the_state_of_a_huge_epoch_is_small_and_its_calls_are_fast() -> None:
    live = [slot for slot in range(1024) if slot % 100]
    plan = TicketPlan(10**9, 1024)
    for step in range(20):
        plan.take(live)
        if step % 2:
            plan.commit(live)
    plan.take(live)
    assert len(json.dumps(plan.state_dict())) < 10_000
    restored = TicketPlan(10**9, 1024)
    restored.load_state_dict(plan.state_dict())
    assert restored.in_flight == plan.in_flight
    assert list(islice(restored.upcoming(7), 3)) == [7 + 1024 * 21, 7 + 1024 * 22, 7 + 1024 * 23]
    assert restored.remaining_steps(live) == -(-(10**9 - 21 * len(live)) // len(live))


def test_a_new_round_costs_as_much_as_there_are_segments_not_slots_times_segments() -> None:
    plan = TicketPlan(1024 * 1023, 1024)
    live = list(range(1, 1024))
    for _ in range(1023):
        plan.take(live)
        plan.commit(live)
    plan.add(2000)
    begin = time.process_time()
    plan.take([*live, 2000])
    assert plan.round == 1
    assert time.process_time() - begin < 1.0
    assert len(plan.state_dict()["pool"]) < 10


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: TicketPlan(-1, 2), "at least 0 tickets"),
        (lambda: TicketPlan(1, 0), "at least 1 slot"),
        (lambda: TicketPlan(4, 2).take([]), "at least one slot"),
        (lambda: TicketPlan(4, 2).take([1, 1]), "none twice"),
        (lambda: TicketPlan(4, 2).load_state_dict(TicketPlan(5, 2).state_dict()), "same dataset and batch size"),
        (lambda: TicketPlan(4, 2).load_state_dict({**TicketPlan(4, 2).state_dict(), "version": 0}), "version 0"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_who_joins_and_dies_at_once_leaves_each_ticket_to_be_trained_once() -> None:
    for num_before in range(1, 12):
        plan = TicketPlan(24, 3)
        plan.begin_epoch(1)
        done: list[int] = []
        plan.remove(1)
        for _ in range(num_before):
            plan.take([0, 2])
            done += chain.from_iterable(plan.commit([0, 2]).values())
        plan.add(1)
        plan.take([0, 1, 2])
        done += chain.from_iterable(plan.commit([0, 2]).values())  # 1 died in its first step
        plan.remove(1)
        done += finish(plan, [0, 2], window=1)
        assert sorted(done) == list(range(24)), num_before
