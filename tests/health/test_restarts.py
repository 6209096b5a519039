"""Verdicts on restarts, of losses that are made up; those of real trainings are in ``benchmarks/health.py``."""

import json
import math
import random

import pytest

from lightning_ft.health.restarts import RestartWatch


def falling(num: int, *, start: float = 3.0, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [(1.0 + (start - 1.0) * math.exp(-i / 60)) * (1.0 + 0.1 * noise.gauss(0, 1)) for i in range(num)]


def judge(before, after, *, reason="resume", norms=None, replicas=(1, 1), **options):
    watch = RestartWatch(**options)
    for step, loss in enumerate(before, 1):
        norm = {} if norms is None else {"grad_norm": norms[step - 1]}
        assert watch.observe(step, {"loss": loss, **norm}) is None
    assert watch.restart(len(before), reason, replicas=replicas) is None
    for step, loss in enumerate(after, len(before) + 1):
        norm = {} if norms is None else {"grad_norm": norms[step - 1]}
        verdict = watch.observe(step, {"loss": loss, **norm})
        if verdict is not None:
            return verdict
    return watch.close()


def test_what_goes_on_is_continuous_wherever_it_is_interrupted():
    losses = falling(400)
    for step in range(20, 380, 7):
        verdict = judge(losses[:step], losses[step : step + 20])
        assert (verdict.outcome, verdict.step, verdict.num_steps) == ("continuous", step, 20)


@pytest.mark.parametrize(
    ("outcome", "change"),
    [
        ("spike", lambda values: [2.5 * value for value in values]),
        ("spike", lambda values: [values[0], 50.0, *values[2:]]),  # the first step still has the weights from before
        ("spike", lambda values: [values[0], *[3 * value for value in values[1:6]], *values[6:]]),
        ("drop", lambda values: [value / 10 for value in values]),
        ("nan", lambda values: [*values[:7], math.nan, *values[8:]]),
        ("nan", lambda values: [math.inf, *values[1:]]),
        ("continuous", lambda values: [1.2 * values[0], *values[1:]]),
    ],
)
def test_what_does_not_go_on_is_named(outcome, change):
    losses = falling(200)
    for step in (40, 100, 180):
        verdict = judge(losses[:step], change(losses[step : step + 20]))
        assert (verdict.outcome, verdict.is_bad) == (outcome, outcome != "continuous")


def test_spike_that_is_over_in_five_steps_is_one_though_the_losses_fell_fast_before():
    losses = [2.4 - 0.7 * min(1.0, i / 20) + (0.25 if i % 3 else -0.25) for i in range(47)]
    usual = losses[27:43]
    assert judge(losses, [losses[-1], 5.0, 4.5, 3.4, *usual]).outcome == "spike"
    assert judge(losses, [losses[-1], 5.0, *usual, *usual[:2]]).outcome == "continuous"


def test_what_can_not_be_made_up_for_is_told_at_once():
    losses = falling(120)
    assert judge(losses[:100], [losses[100], math.nan, *losses[102:]]).num_steps == 2
    assert judge(losses[:100], [losses[100], 500.0, *losses[102:]]).num_steps == 2
    assert judge(losses[:100], [1.3 * losses[100], *losses[101:]]).num_steps == 20


def test_restart_in_warm_up_is_undecided_whatever_follows_but_nan():
    assert judge([2.0, 2.1, 1.9], [50.0] * 20).outcome == "undecided"
    assert judge([], [1.0] * 20).outcome == "undecided"
    assert judge([2.0, 2.1, 1.9], [math.nan] * 20).outcome == "nan"
    assert judge([2.0] * 50, []).outcome == "undecided"


def test_values_after_an_undecided_restart_are_not_mixed_with_those_before():
    watch = RestartWatch()
    for step, loss in enumerate([*[50.0] * 10, *[2.0] * 30], 1):
        if step == 11:
            watch.restart(10, "resume")
        watch.observe(step, {"loss": loss})
    watch.restart(40, "death")
    verdicts = [watch.observe(step, {"loss": 50.0}) for step in range(41, 61)]
    assert [verdict.outcome for verdict in verdicts if verdict] == ["spike"]


def test_constant_loss_with_rounding_is_continuous():
    assert judge([2.0] * 60, [2.0001] * 20).outcome == "continuous"


def test_window_ends_with_the_next_restart():
    watch = RestartWatch()
    for step in range(1, 51):
        watch.observe(step, {"loss": 2.0})
    watch.restart(50, "death")
    watch.observe(51, {"loss": 2.0})
    first = watch.restart(51, "rejoin")
    assert watch.restart(51, "resume") is None  # at the same step: one restart
    second = watch.observe(52, {"loss": 200.0})
    assert (first.reason, first.outcome, first.num_steps) == ("death", "continuous", 1)
    assert (second.reason, second.outcome, second.num_steps) == ("rejoin+resume", "spike", 1)
    assert str(second) == "after the rejoin+resume at step 51: spike (loss 200, usually 2)"


@pytest.mark.parametrize("bad", [50.0, math.nan])
def test_divergence_does_not_become_usual_by_going_on(bad):
    watch = RestartWatch()
    for step in range(1, 51):
        watch.observe(step, {"loss": 2.0 + 0.01 * (step % 3)})
    watch.restart(50, "resume")
    for step in range(51, 400):
        watch.observe(step, {"loss": bad})
    assert watch.is_diverged
    watch.restart(399, "death")
    verdicts = [watch.observe(step, {"loss": bad}) for step in range(400, 420)]
    assert [verdict.is_bad for verdict in verdicts if verdict] == [True]
    for step in range(420, 440):  # and it is over when the values are what they were
        watch.observe(step, {"loss": 2.0 + 0.01 * (step % 3)})
    assert not watch.is_diverged


def test_rollback_is_judged_by_what_was_before_the_step_it_goes_back_to():
    losses = falling(300)
    watch = RestartWatch()
    for step in range(1, 201):
        watch.observe(step, {"loss": losses[step - 1]})
    for step in range(201, 230):  # something goes wrong slowly
        watch.observe(step, {"loss": losses[step - 1] * (1 + 0.01 * (step - 200))})
    verdict = None
    for step in range(190, 210):  # nobody tells of the rollback
        verdict = watch.observe(step, {"loss": losses[step - 1]}) or verdict
    assert (verdict.reason, verdict.step, verdict.outcome) == ("rollback", 189, "continuous")
    assert watch.state_dict()["series"]["loss"]["entered"][-21][0] == 189


def test_norm_of_the_mean_of_fewer_gradients_may_be_larger_after_a_death():
    noise = random.Random(3)
    norms = [1.0 + 0.03 * noise.gauss(0, 1) for _ in range(60)]
    norms += [5.5 * norm for norm in norms[-20:]]
    losses = falling(80)
    of_death = judge(losses[:60], losses[60:], norms=norms, reason="death", replicas=(16, 1))
    assert of_death.outcome == "continuous"
    of_resume = judge(losses[:60], losses[60:], norms=norms)
    assert (of_resume.outcome, of_resume.series) == ("spike", "grad_norm")


def test_state_is_the_same_after_a_round_trip_at_any_step():
    losses = falling(120)
    losses[81:] = [3 * loss for loss in losses[81:]]
    one, other = RestartWatch(), RestartWatch()
    verdicts = []
    for step, loss in enumerate(losses, 1):
        if step == 80:
            one.restart(79, "death")
            other.restart(79, "death")
        found = [watch.observe(step, {"loss": loss, "grad_norm": math.sqrt(loss)}) for watch in (one, other)]
        assert found[0] == found[1]
        verdicts += [found[0]] if found[0] else []
        fresh = RestartWatch()
        fresh.load_state_dict(json.loads(json.dumps(other.state_dict())))
        other = fresh
        assert other.state_dict() == one.state_dict()
    assert [verdict.outcome for verdict in verdicts] == ["spike"]
    assert one.is_diverged
