"""Which slots are away, and when that is told."""

from lightning_ft.health.outages import Outages


def test_each_outage_is_told_once_when_it_lasts():
    outages = Outages(patience=50)
    outages.start(0, (0, 1, 2), 3)
    assert outages.change(10, (0, 2)) == "recovery"
    assert (outages.away, outages.last) == ({1: 10}, "slot 1 @ 10")
    assert outages.overdue(59) == {}
    assert outages.overdue(60) == {1: 10}
    assert outages.overdue(99) == {}
    assert outages.change(100, (0, 2, 1)) == "joining"
    assert outages.away == {}
    assert outages.change(110, (0, 2)) == "recovery"
    assert outages.overdue(160) == {1: 110}


def test_slot_that_is_gone_and_back_within_a_batch_was_a_fault():
    outages = Outages()
    outages.start(0, (0, 1), 2)
    assert outages.change(7, (1, 0)) == "recovery"
    assert (outages.away, outages.last) == ({}, "step 7")


def test_slots_that_are_away_from_the_start_are_known():
    outages = Outages(patience=5)
    outages.start(20, (1,), 3)
    assert outages.overdue(25) == {0: 20, 2: 20}
