import json
import math
import random
import time
from collections.abc import Iterable

import pytest

from benchmarks.false_alarms import count, record
from lightning_ft.rerun.baseline import Baseline
from lightning_ft.rerun.findings import PARAMETER_NORM
from lightning_ft.rerun.step_values import LOSS, NORM, OWN_NORM, new_baselines


def trained(values: Iterable[float]) -> Baseline:
    baseline = Baseline()
    for value in values:
        baseline.observe(value)
    return baseline


def noisy(level: float, n: int = 100, scatter: float = 0.05) -> list[float]:
    generator = random.Random(3)
    return [level * (1 + scatter * generator.gauss(0, 1)) for _ in range(n)]


@pytest.mark.parametrize(("training", "steps"), [("classifier", 400), ("gpt", 120), ("drops", 400)])
def test_a_real_training_raises_no_alarm_and_a_loss_ten_times_as_large_does(training, steps):
    for name, (curve,) in record(training, seed=31, steps=steps).items():
        counted = count(name, curve, factors=(10.0, 1000.0))
        assert "false_spikes" not in counted
        assert "false_nan" not in counted
        found = counted["found"]
        assert found[1000.0][0] == found[1000.0][1]
        # A norm that falls tenfold in its first hundred steps has been as large as that before.
        assert name != "loss" or found[10.0][0] >= 0.9 * found[10.0][1]


def test_what_is_not_finite_is_told_from_the_first_value_on():
    assert [Baseline().judge(value).kind for value in (math.nan, math.inf, -math.inf)] == ["nan", "inf", "inf"]
    baseline = trained(noisy(2.0))
    assert [baseline.judge(value).kind for value in (math.nan, math.inf, -math.inf)] == ["nan", "inf", "inf"]


def test_constant_values_are_no_reason_for_alarm_at_a_slightly_other_one():
    for constant in (2.0, 1e-30, -3.0):
        baseline = trained([constant] * 50)
        assert baseline.judge(constant * 1.0001).kind == "fine"
        assert baseline.judge(constant + 10 * abs(constant)).kind == "spike"
    assert trained([0.0] * 50).judge(1e-3).kind == "spike"  # in 50 steps it was never anything but 0


def test_a_loss_near_zero_is_measured_by_what_it_was_before():
    assert trained([*noisy(2.0), *[1e-6] * 200]).judge(5e-3).kind == "fine"
    assert trained([*noisy(2.0), *[1e-6] * 200]).judge(2.0).kind == "spike"


def test_a_divergence_does_not_become_the_usual_by_going_on():
    baseline = trained(noisy(2.0))
    before = baseline.state_dict()["values"]
    assert {baseline.observe(value).kind for value in noisy(9.0, n=500)} == {"spike"}
    assert baseline.num_flagged_in_a_row == 500
    assert baseline.state_dict()["values"] == before
    assert baseline.observe(2.0).kind == "fine"
    assert baseline.num_flagged_in_a_row == 0


def test_a_start_far_above_the_plateau_does_not_hide_a_spike_on_the_plateau():
    assert trained([*noisy(11.0, n=100), *noisy(2.0, n=300)]).judge(11.0).kind == "spike"


def test_a_drop_is_told_and_becomes_the_usual():
    baseline = trained(noisy(2.0))
    assert baseline.judge(0.1).kind == "drop"
    assert not any(baseline.observe(value).is_bad for value in noisy(0.1, n=200))
    assert baseline.judge(0.1).kind == "fine"
    assert baseline.judge(2.0).kind == "spike"


def test_until_it_has_warmed_up_only_what_is_a_thousand_times_larger_is_a_spike():
    baseline = trained(noisy(2.0, n=5))
    assert baseline.judge(50.0).kind == "undecided"
    assert baseline.judge(1e30).kind == "spike"
    assert Baseline().judge(1e30).kind == "undecided"
    baseline = trained(noisy(2.0, n=20))
    assert baseline.judge(50.0).kind == "spike"
    baseline.forget()
    assert baseline.judge(50.0).kind == "undecided"


def test_values_below_zero_are_judged_alike():
    baseline = trained([-value for value in noisy(300.0)])
    assert [baseline.judge(value).kind for value in (-310.0, 900.0, -2000.0)] == ["fine", "spike", "drop"]


def test_one_that_loaded_the_state_of_another_goes_on_like_it():
    values = noisy(2.0, n=300, scatter=0.5)
    one = trained(values[:150])
    one.observe(math.nan)
    other = Baseline()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.num_flagged_in_a_row == 1
    for value in values[150:]:
        assert str(one.observe(value)) == str(other.observe(value))
    assert one.state_dict() == other.state_dict()
    shorter = Baseline(window=32)
    shorter.load_state_dict(one.state_dict())
    assert shorter.state_dict()["values"] == values[-32:]


def test_a_rank_s_own_norm_may_vary_more_than_the_average_s():
    baselines = new_baselines()
    kinds = {}
    for name, baseline in baselines.items():
        for value in noisy(2.0, n=128):
            baseline.observe(value)
        kinds[name] = [baseline.judge(factor * 2.0).kind for factor in (2.0, 4.0, 6.0)]
    assert kinds == {
        LOSS: ["spike", "spike", "spike"],
        NORM: ["fine", "spike", "spike"],
        OWN_NORM: ["fine", "fine", "spike"],
        PARAMETER_NORM: ["fine", "spike", "spike"],
    }


def test_what_it_says_names_the_expected_range():
    assert str(trained([2.0] * 50).judge(7.0)) == "7 (spike; usual 2, expected 1 to 3)"
    assert str(Baseline().judge(math.nan)) == "nan (nan; too few values before)"


def test_a_value_costs_microseconds():
    baseline = trained(noisy(2.0, n=128))
    started = time.process_time()
    for _ in range(10_000):
        baseline.observe(2.0)
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scatters": 0}, r"`Baseline\(scatters=0\)` is not valid: expected a number greater than 0."),
        ({"jump": math.nan}, r"`Baseline\(jump=nan\)` is not valid"),
        ({"window": 4}, r"`Baseline\(window=4\)` is not valid: expected an integer, 8 or more."),
        ({"warm_up": 500}, r"`Baseline\(warm_up=500\)` is not valid: expected at most `window`, which is 128."),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Baseline(**arguments)
