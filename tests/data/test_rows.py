import pickle
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_ft.data.rows import RowPlan
from lightning_ft.data.tickets import TicketPlan


def run_row(plans: dict[int, RowPlan], live: list[int]) -> None:
    """Have the plans of all live slots take a row; they must agree."""
    (passes,) = {str([plan.take(live), *iter(plan.take_extra, None)]) for plan in (plans[slot] for slot in live)}
    assert passes


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_steps_hold_the_same_tickets_whoever_dies_and_joins(num_tickets: int, num_slots: int, window: int, data) -> None:
    plans = {slot: RowPlan(num_tickets, num_slots) for slot in range(num_slots)}
    live, steps = list(range(num_slots)), []
    while plans[live[0]].remaining_steps(live):
        rows = min(window, plans[live[0]].remaining_steps(live))
        for _ in range(rows):
            run_row(plans, live)
        for _ in range(2):  # some die in the step, and some while their tickets are trained
            dead = data.draw(st.sets(st.sampled_from(live), max_size=len(live) - 1))
            live = [slot for slot in live if slot not in dead]
            if not all(plans[slot].covers(live) for slot in live):
                (_,) = {str(plans[slot].take_over(live)) for slot in live}
        (done,) = {str(plans[slot].commit(live)) for slot in live}
        steps.append(sorted(ticket for tickets in eval(done).values() for ticket in tickets))
        back = data.draw(st.sets(st.sampled_from(range(num_slots)))) - set(live)
        for slot in back:
            plans[slot] = RowPlan(num_tickets, num_slots)
            plans[slot].load_state_dict(plans[live[0]].state_dict())
        live = sorted({*live, *back})
        for slot in live:
            plans[slot].add(live[0])
    size = num_slots * window
    assert steps == [list(range(first, min(first + size, num_tickets))) for first in range(0, num_tickets, size)]


def everything_told(plan: RowPlan, live: tuple[int, ...]) -> tuple[Any, ...]:
    rows = {ticket: plan.row_of(ticket) for tickets in plan.in_flight.values() for ticket in tickets}
    upcoming = [] if plan.has_extra else [list(plan.upcoming(slot)) for slot in live]
    counts = plan.row, plan.round, plan.remaining_steps(live), plan.size_of_pass, plan.has_extra, plan.covers(live)
    return rows, upcoming, counts, plan.in_flight, plan.state_dict()


@given(
    st.integers(0, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["take"] * 4 + ["commit"] * 4 + ["die", "join"]), st.integers(0, 3)), max_size=30),
)
@example(9, 2, [("die", 1), ("take", 1), ("join", 1), ("take", 0), ("commit", 0)])  # a step with and without lockstep
@settings(max_examples=150, deadline=None)
def test_a_plan_that_is_never_asked_goes_on_like_one_that_always_is(
    num_tickets: int, num_slots: int, happens: list[tuple[str, int]]
) -> None:
    plan, asked = plans = RowPlan(num_tickets, num_slots), RowPlan(num_tickets, num_slots)
    live, told = tuple(range(num_slots)), []

    def both(name: str, *arguments: Any) -> Any:
        answers = [getattr(each, name)(*arguments) for each in plans]
        first, second = (dict(answer) if isinstance(answer, Mapping) else answer for answer in answers)
        assert first == second
        told.append((answers[0], second))
        everything_told(asked, live)
        return second

    for kind, number in happens:
        if kind == "take":
            is_over = not both("take", live)
            while number and not is_over and both("take_extra") is not None:  # without them the batch is skipped
                pass
        elif kind == "commit":
            if not asked.covers(live):
                both("take_over", live)
            both("commit", live)
        elif kind == "die" and len(live) > 1:
            dead = live[number % len(live)]
            live = tuple(slot for slot in live if slot != dead)
            both("remove", dead)
        elif kind == "join":
            both("add", number % num_slots)
            live = tuple(sorted({*live, number % num_slots}))
        assert everything_told(pickle.loads(pickle.dumps(plan)), live) == everything_told(asked, live)
    assert all((dict(before) if isinstance(before, Mapping) else before) == after for before, after in told)


def test_slots_train_their_own_tickets_first_and_the_others_by_turns() -> None:
    plan = RowPlan(num_tickets=11, num_slots=3)
    assert plan.take([0, 2]) == {0: 0, 2: 2}
    assert plan.take_extra() == {0: 1, 2: None}
    assert plan.take_extra() is None
    assert plan.commit([0, 2]) == {0: [0, 1], 2: [2]}
    assert list(plan.upcoming(0)) == [3, 6, 7, 9]
    assert list(plan.upcoming(2)) == [5, 4, 8, 10]
    assert plan.remaining_steps([0]) == plan.remaining_steps([0, 1, 2]) == 3


def test_what_was_told_to_come_is_what_comes_until_the_membership_changes() -> None:
    plan = RowPlan(num_tickets=30, num_slots=4)
    plan.take([0, 1, 3])
    told, before, taken = plan.upcoming(1), plan.round, []
    while True:
        while (tickets := plan.take_extra()) is not None:
            taken += [tickets[1]]
        plan.commit([0, 1, 3])
        if not (tickets := plan.take([0, 1, 3])):
            break
        taken += [tickets[1]]
    assert [ticket for ticket in taken if ticket is not None] == list(told)
    assert plan.round == before
    plan.begin_epoch(1)
    before = plan.round
    plan.take([0, 1, 2, 3])
    assert plan.round != before


def test_a_position_is_that_of_tickets_and_either_plan_continues_there() -> None:
    rows, tickets = RowPlan(num_tickets=11, num_slots=3), TicketPlan(num_tickets=11, num_slots=3)
    rows.take([0, 1, 2])
    rows.commit([0, 1, 2])
    rows.take([0, 1, 2])  # not committed
    tickets.load_state_dict(rows.state_dict())
    assert sorted(tickets.open_tickets()) == list(range(3, 11))
    tickets.take([0, 2])
    tickets.commit([0, 2])
    rows.load_state_dict(tickets.state_dict())
    assert rows.take([0, 1, 2]) == {0: 4, 1: 6, 2: 7}
    assert rows.global_batch is None
