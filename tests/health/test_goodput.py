"""The account of time, with a clock that is set by hand."""

import json

import pytest

from lightning_ft.health.goodput import Goodput


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(goodput: Goodput, clock: Clock, steps: range, seconds: float = 1.0, **options) -> None:
    for step in steps:
        clock.now += seconds
        goodput.end_step(step, seconds, **options)


def test_time_is_useful_unless_it_is_lost(clock):
    goodput = Goodput(clock)
    goodput.begin()
    clock.now += 10
    goodput.start(0)
    train(goodput, clock, range(1, 31))
    assert (goodput.fraction, goodput.lost["startup"]) == (0.75, 10.0)
    clock.now += 20  # in which it evaluates
    goodput.lose("checkpoint", 5.0)
    clock.now += 5
    assert goodput.seconds == 65.0
    assert goodput.fraction == pytest.approx(50 / 65)


def test_change_of_membership_costs_what_its_step_took_beyond_a_usual_one(clock):
    goodput = Goodput(clock)
    goodput.start(0)
    train(goodput, clock, range(1, 11))
    train(goodput, clock, range(11, 12), 4.0, change="recovery", live=3, replicas=4)
    train(goodput, clock, range(12, 14), 1.0, live=3, replicas=4)
    train(goodput, clock, range(14, 15), 3.0, change="joining", live=4, replicas=4)
    lost = goodput.lost
    assert (lost["recovery"], lost["joining"], lost["missing"]) == (3.0, 2.0, 0.75)
    assert goodput.usual_step == 1.0


def test_steps_that_are_done_again_are_lost_once(clock):
    goodput = Goodput(clock)
    goodput.start(0)
    train(goodput, clock, range(1, 11))
    train(goodput, clock, range(8, 9), 6.0, change="recovery")
    train(goodput, clock, range(9, 13))
    assert (goodput.lost["recovery"], goodput.lost["recomputation"]) == (5.0, 3.0)
    assert goodput.fraction == pytest.approx(12 / 20)


def test_account_goes_on_in_the_run_that_resumes(clock):
    first = Goodput(clock)
    first.start(0)
    train(first, clock, range(1, 11))
    state = json.loads(json.dumps(first.state_dict(10)))
    train(first, clock, range(11, 16))  # is lost, and trained again
    clock.now += 95
    second = Goodput(clock)
    second.begin()
    second.load_state_dict(state)
    clock.now += 10
    second.start(10)
    train(second, clock, range(11, 21))
    assert second.seconds == 130.0
    assert (second.lost["restart"], second.lost["startup"], second.lost["recomputation"]) == (100.0, 10.0, 0.0)
    assert second.fraction == pytest.approx(20 / 130)


def test_time_between_two_fits_of_a_process_is_not_counted(clock):
    goodput = Goodput(clock)
    goodput.start(0)
    train(goodput, clock, range(1, 3))
    goodput.pause()
    clock.now += 500
    goodput.start(2)
    train(goodput, clock, range(3, 5))
    assert (goodput.seconds, goodput.fraction) == (4.0, 1.0)


def test_rank_that_joins_goes_on_with_the_account_of_the_others(clock):
    first = Goodput(clock)
    first.start(0)
    train(first, clock, range(1, 11))
    joiner = Goodput(clock)
    joiner.begin()
    clock.now += 5
    first.end_step(11, 5.0)
    joiner.load_state_dict(json.loads(json.dumps(first.state_dict(11))))
    clock.now += 1
    joiner.start(11, joins=True)
    first.end_step(12, 1.0)
    train(joiner, clock, range(12, 13))
    assert (joiner.seconds, joiner.lost) == (first.seconds - 1.0, first.lost)
