"""Who is named a straggler, and who is not."""

import json

from lightning_ft.health.stragglers import StragglerWatch


def observe(watch, windows, first=1):
    return [found for step, window in enumerate(windows, first) for found in watch.observe(10 * step, window)]


def test_rank_that_stays_slow_is_named_once():
    watch = StragglerWatch()
    assert observe(watch, [{0: 0.1, 1: 0.1, 2: 0.11}] * 5) == []
    (found,) = observe(watch, [{0: 0.1, 1: 0.3, 2: 0.1}] * 10, first=6)
    assert (found.slot, found.since) == (1, 60)
    assert abs(found.over_peers - 3.0) < 1e-6
    assert abs(found.over_past - 3.0) < 1e-6
    assert str(found) == (
        "slot 1 takes 300 ms for its part of a step since step 60: 3.0 times the others' median, and 3.0 times what it"
        " took before"
    )
    assert observe(watch, [{0: 0.1, 1: 0.1, 2: 0.1}], first=16) == []
    assert len(observe(watch, [{0: 0.1, 1: 0.3, 2: 0.1}] * 5, first=17)) == 1  # it was well in between


def test_hiccups_small_differences_and_what_slows_everybody_are_no_stragglers():
    watch = StragglerWatch()
    assert observe(watch, [*[{0: 0.1, 1: 0.9}] * 4, {0: 0.1, 1: 0.1}] * 4) == []
    assert observe(watch, [{0: 0.001, 1: 0.02}] * 9) == []
    assert observe(watch, [{0: 0.4, 1: 0.5, 2: 0.4}] * 9) == []
    assert observe(watch, [{3: 0.4}] * 9) == []


def test_rank_that_was_always_slow_is_named_without_a_past():
    watch = StragglerWatch()
    (found,) = observe(watch, [{0: 0.1, 1: 0.1, 2: 0.2}] * 6)
    assert (found.slot, found.over_past) == (2, None)


def test_rank_that_was_away_begins_anew_and_state_goes_on():
    watch = StragglerWatch()
    slow = {0: 0.1, 1: 0.1, 2: 0.5}
    assert observe(watch, [slow] * 4 + [{0: 0.1, 1: 0.1}] + [slow] * 4) == []
    fresh = StragglerWatch()
    fresh.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert [found.slot for found in observe(fresh, [slow], first=10)] == [2]
