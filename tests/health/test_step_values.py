"""What the ranks conclude from each other's rows."""

import math

import torch

from lightning_ft.health.monitor import HealthMonitor, Membership
from lightning_ft.health.step_values import OwnSteps, Reason, merge


def test_loss_is_the_mean_over_the_batches_that_count():
    ranks = [OwnSteps(4) for _ in range(3)]
    for own, losses in zip(ranks, ([torch.tensor(1.0), torch.tensor(3.0)], [5.0], []), strict=True):
        own.add(7, losses, torch.tensor(0.5), Reason(0))
        own.seconds += [0.1, 0.3, 0.2]
    told = merge([own.row(slot, 7) for slot, own in enumerate(ranks)], 7)
    (step,) = told.steps
    assert (step.step, step.loss, step.grad_norm) == (7, 3.0, 0.5)
    assert told.seconds == {0: 0.2, 1: 0.2, 2: 0.2}


def test_rank_that_came_later_knows_what_the_others_tell_of_the_steps_before():
    early, late = OwnSteps(3), OwnSteps(3)
    for step in (8, 9, 10):
        early.add(step, [float(step)], None, Reason.REJOIN if step == 10 else Reason(0))
    late.add(10, [20.0], None, Reason(0))
    told = merge([late.row(1, 10), early.row(0, 10)], 10)
    assert [(step.step, step.loss, step.grad_norm) for step in told.steps] == [
        (8, 8.0, None),
        (9, 9.0, None),
        (10, 15.0, None),
    ]
    assert told.steps[-1].reasons == Reason.REJOIN
    assert told.seconds == {}


def test_nan_of_one_rank_is_the_loss_of_all():
    ranks = [OwnSteps(1), OwnSteps(1)]
    ranks[0].add(1, [1.0], None, Reason(0))
    ranks[1].add(1, [math.nan], None, Reason.DEATH | Reason.RESUME)
    (step,) = merge([own.row(0, 1) for own in ranks], 1).steps
    assert math.isnan(step.loss)
    assert step.reasons.text == "death+resume"


def test_all_ranks_conclude_the_same_also_one_that_joined_in_between():
    both = Membership(0, (0, 1), 2, 2, 2)
    monitors = [HealthMonitor(5, 10), HealthMonitor(5, 10)]
    for monitor in monitors:
        monitor.start(0, both)

    def train(steps, members, monitors, loss=2.0):
        found = []
        for step in steps:
            for monitor in monitors:
                monitor.end_step(step, seconds=1.0, own_seconds=0.5, losses=[loss], norm=None, members=members)
            if step % 10 == 0:
                rows = [monitor.row(slot) for slot, monitor in enumerate(monitors)]
                told = [monitor.conclude(rows) for monitor in monitors]
                assert all(other == told[0] for other in told)
                found += told[0].verdicts
        return found

    assert train(range(1, 41), both, monitors) == []
    alone = Membership(1, (0,), 2, 1, 2)
    (verdict,) = train(range(41, 54), alone, monitors[:1])
    assert (verdict.reason, verdict.outcome, verdict.step) == ("death", "continuous", 40)
    assert monitors[0].outages.away == {1: 41}
    joiner = HealthMonitor(5, 10)
    joiner.load_state_dict(monitors[0].state_dict())
    joiner.start(53, Membership(2, (0, 1), 2, 2, 2), joins=True)
    (verdict,) = train(range(54, 61), Membership(2, (0, 1), 2, 2, 2), [monitors[0], joiner], loss=20.0)
    assert (verdict.reason, verdict.outcome, verdict.step) == ("rejoin", "spike", 53)
    assert joiner.restarts.state_dict() == monitors[0].restarts.state_dict()
    assert monitors[0].report()["discontinuities"] == joiner.report()["discontinuities"] == 1.0


def test_unusual_values_without_a_restart_are_told_once_in_a_row():
    monitor = HealthMonitor(5, 100)
    monitor.start(0, Membership())
    losses = [2.0] * 30 + [math.nan] * 10 + [2.0] * 5 + [90.0]
    for step, loss in enumerate(losses, 1):
        monitor.end_step(step, seconds=1.0, own_seconds=1.0, losses=[loss], norm=None, members=Membership())
    found = monitor.conclude([monitor.row(0)])
    assert [str(values) for values in found.unusual] == ["step 31: loss nan", "step 46: loss 90"]
    assert found.verdicts == []
    assert monitor.report()["unusual_steps"] == 11.0
