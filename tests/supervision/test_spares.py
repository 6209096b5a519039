"""Which processes wait for a rank to die, first as bookkeeping, then in a training."""

from collections.abc import Callable
from typing import Any

from lightning_ft.supervision.spares import Spares
from lightning_ft.testing import Fault, FaultPlan


def test_spare_is_taken_once_and_replaced_when_the_ranks_had_their_time() -> None:
    spares = Spares()
    first, second = spares.take_due(2, now=0.0)
    assert spares.deadline(2) is None
    assert spares.take(0.1) is None, "none of them waits yet"
    spares.parked(second, call=0)
    assert spares.take(1.0) == second
    assert spares.take(1.0) is None
    assert spares.take_due(2, now=1.1) == []
    deadline = spares.deadline(2)
    assert deadline is not None
    assert len(spares.take_due(2, deadline)) == 1
    assert spares.deadline(2) is None
    assert spares.take_due(1, 9.0) == []
    spares.ended(first, 9.0)


def test_spares_that_end_before_they_wait_start_ever_more_rarely() -> None:
    spares, now, delays = Spares(), 0.0, []
    for _ in range(9):
        (number,) = spares.take_due(1, now)
        spares.ended(number, now)
        deadline = spares.deadline(1)
        assert deadline is not None
        assert spares.take_due(1, deadline - 0.01) == []
        delays.append(deadline - now)
        now = deadline
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    (number,) = spares.take_due(1, now)
    spares.parked(number, call=0)
    spares.ended(number, now)
    assert len(spares.take_due(1, now)) == 1, "one that waited was none of these"


def test_spare_is_sent_past_each_call_once() -> None:
    spares = Spares()
    (number,) = spares.take_due(1, 0.0)
    assert spares.take_behind(3) == []
    spares.parked(number, call=0)
    assert spares.take_behind(0) == []
    assert spares.take_behind(2) == [(number, 0)]
    assert spares.take_behind(2) == []
    assert spares.take(0.0) is None, "it is on its way to the next call"
    spares.parked(number, call=1)
    assert spares.take_behind(2) == [(number, 1)]


def test_of_two_deaths_at_once_one_is_made_good_by_the_spare_and_one_by_a_new_process(
    train: Callable[..., Any],
) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=0, point="forward", step=5, rendezvous=True),
            Fault(kind="kill", slot=2, point="forward", step=5, rendezvous=True),
            Fault(kind="kill", slot=1, point="backward_early", step=9, rendezvous=True),
        ]
    )
    training = train(plan, ft={"min_replicas": 3, "spares": 1}, calls=("validate", "fit", "test", "predict"))
    training.assert_went_on(plan)
    assert {slot: result["incarnation"] for slot, result in training.results.items()} == {0: 1, 1: 1, 2: 1}
    spares = {event["pid"] for event in training.of("spare")}
    spawned = {event["pid"] for event in training.of("spawn") if event["incarnation"]}
    assert len(spawned) == 3
    assert len(spawned & spares) in (1, 2), "the third death may come before the next spare waits"
    assert not training.of("spare_exit")
    assert list(training.directory.glob("**/supervisor.jsonl"))
    assert not list(training.directory.glob("**/slot_-1*")), "a spare is no rank"
    assert "[spare]" not in training.job.stdout + training.job.stderr
