from typing import Any

import pytest

from lightning_ft.events.audit import audit

Record = dict[str, Any]


def event(kind: str, t: float, /, slot: int | None = None, incarnation: int = 0, **fields: Any) -> Record:
    return {"t": t, "event": kind, "slot": slot, "incarnation": incarnation, **fields}


def step(t: float, number: int, slot: int, tickets: dict[str, list[int]], incarnation: int = 0, epoch: int = 0) -> Record:
    members = sorted(map(int, tickets))
    return event("step", t, slot, incarnation, step=number, epoch=epoch, tickets=tickets, members=members)


def change(t: float, number: int, slot: int | None, **fields: Any) -> Record:
    if slot is None:
        return event("generation", t, None, number=number, incarnations={}, hold=False, **fields)
    return event("generation", t, slot, generation=number, stall_ms=20.0, **{"joined": [], "dead": [], **fields})


def one_death() -> list[Record]:
    """Slot 1 of 2 dies after step 2, is back for step 5, and the epoch of 8 tickets is trained in 5 steps."""
    records = [
        change(0.0, 1, None, members=[0, 1], reason="start", dead=[]),
        event("epoch", 0.5, 0, epoch=0, num_tickets=8),
        *(step(1.0, 1, slot, {"0": [0], "1": [1]}) for slot in (0, 1)),
        *(step(2.0, 2, slot, {"0": [2], "1": [3]}) for slot in (0, 1)),
        event("exit", 2.5, 1, 0, how="SIGKILL", code=-9, member=True),
        change(2.6, 2, None, members=[0], reason="death", dead=[{"slot": 1, "incarnation": 0, "how": "SIGKILL"}]),
        change(2.7, 2, 0, members=[0], reason="death", dead=[[1, "SIGKILL"]]),
        step(3.5, 3, 0, {"0": [4]}),
        step(4.5, 4, 0, {"0": [6]}),
        change(4.9, 3, None, members=[0, 1], reason="join", dead=[]),
        change(5.0, 3, 0, members=[0, 1], reason="join", joined=[1]),
        event("joined", 5.1, 1, 1, step=4, epoch=0),
        *(step(6.0, 5, slot, {"0": [5], "1": [7]}, incarnation=slot) for slot in (0, 1)),
        event("exit", 7.0, 0, 0, how="exit code 0", code=0, member=False),
        event("finish", 8.0, code=0, error=None),
    ]
    return records


def test_a_death_is_described_by_what_it_cost() -> None:
    found = audit(one_death())
    (death,) = found.deaths
    assert (death.slot, death.incarnation, death.how, death.step) == (1, 0, "SIGKILL", 2)
    assert found.median_step == 1.0
    assert death.recovery == pytest.approx(1.0)
    assert death.stall == pytest.approx(0.5)
    assert death.reconfiguration == pytest.approx(0.02)
    assert death.respawn == pytest.approx(3.5)


def test_steps_that_all_ranks_gave_up_to_go_back_to_a_snapshot_do_not_count() -> None:
    records = [
        event("epoch", 0.5, 0, epoch=0, num_tickets=4),
        *(step(1.0, 1, slot, {"0": [0], "1": [1]}) for slot in (0, 1)),
        event("accumulated", 1.5, 1, batch=2, epoch=0, tickets={"1": [3]}, members=[0, 1]),
        *(step(2.0, 2, slot, {"0": [2], "1": [3]}) for slot in (0, 1)),
        event("exit", 2.5, 1, 0, how="SIGKILL", code=-9, member=True),
        change(2.7, 2, 0, members=[0], reason="death", dead=[[1, "SIGKILL"]]),
        event("rewound", 2.8, 0, step=1, batch=1, lost=1),
        step(3.5, 2, 0, {"0": [2]}),
        step(4.5, 3, 0, {"0": [3]}),
    ]
    found = audit(records)
    assert found.steps == (1, 2, 3)
    assert found.problems() == []
    assert audit([record for record in records if record["event"] != "rewound"]).problems() != []


def test_a_death_that_a_plan_caused_happened_when_the_fault_fired() -> None:
    fault = event("fault", 2.4, 1, 0, index=0, kind="kill", point="forward", step=2)
    (death,) = audit([*one_death(), fault]).deaths
    assert death.time == 2.4
    assert death.recovery == pytest.approx(1.1)


def test_a_death_is_recovered_by_those_who_went_on_before_the_end_of_its_process_was_told() -> None:
    """A rank that raised or was excluded, of whose end a busy supervisor tells late."""
    for exit in ({"how": "excluded: hung", "code": -9}, {"how": "ValueError: no", "code": 1, "ago": 0.8}):
        records = [record for record in one_death() if record["event"] != "exit" or record["code"] == 0]
        (death,) = audit([*records, event("exit", 3.6, 1, 0, member=True, **exit)]).deaths
        assert (death.time, death.step, death.recovery) == (2.6, 2, pytest.approx(0.9))
        assert death.reconfiguration == pytest.approx(0.02)


def test_a_join_is_described_by_the_gap_in_the_steps_of_the_others() -> None:
    (join,) = audit(one_death()).joins
    assert (join.slot, join.incarnation, join.step) == (1, 1, 4)
    assert join.gap == pytest.approx(0.5)


def test_a_run_that_trained_everything_once_has_no_problems() -> None:
    found = audit(one_death())
    assert found.problems() == []
    assert found.steps == (1, 2, 3, 4, 5)
    assert found.exit_code == 0
    assert [(g.reason, g.members, g.dead) for g in found.generations] == [
        ("start", (0, 1), ()),
        ("death", (0,), (1,)),
        ("join", (0, 1), ()),
    ]


def test_tickets_trained_twice_or_never_are_listed() -> None:
    records = [
        event("epoch", 0.0, 0, epoch=0, num_tickets=4),
        step(1.0, 1, 0, {"0": [0], "1": [1]}),
        step(2.0, 2, 0, {"0": [1], "1": [9]}),
    ]
    found = audit(records)
    assert (found.epochs[0].twice, found.epochs[0].never, found.epochs[0].unknown) == ((1,), (2, 3), (9,))
    assert found.problems() == [
        "Epoch 0 trained 1 twice.",
        "Epoch 0 trained 2, 3 never.",
        "Epoch 0 trained 9 without having it.",
    ]
    assert "Epoch 0 trained 2, 3 never." not in found.problems(unfinished_epoch=True)


def test_an_epoch_that_nobody_announced_cannot_be_complete() -> None:
    assert audit([step(1.0, 1, 0, {"0": [0]})]).problems() == ["Nobody said how many batches epoch 0 has."]


def test_steps_that_nobody_committed_are_lost() -> None:
    records = [step(float(number), number, 0, {"0": []}) for number in (1, 2, 5)]
    assert audit(records).steps_lost == (3, 4)


def test_ranks_that_record_different_contents_of_a_step_are_a_conflict() -> None:
    records = [step(1.0, 1, 0, {"0": [0], "1": [1]}), step(1.0, 1, 1, {"0": [0], "1": [2]})]
    assert audit(records).conflicts == (1,)


def test_two_deaths_at_once_are_both_recovered_from_whoever_learns_of_them_in_one_change_or_in_two() -> None:
    def learned(t: float, slot: int, generation: int, dead: list[int]) -> dict[str, Any]:
        told = [[one, "SIGKILL"] for one in dead]
        return event("generation", t, slot, 0, generation=generation, dead=told, joined=[], stall_ms=1.0)

    records = [
        *(step(1.0, 1, slot, {"0": [0], "1": [1], "2": [2]}) for slot in range(3)),
        event("exit", 1.1, 0, 0, how="SIGKILL", code=-9, member=True),
        learned(1.2, 2, 2, [0]),
        event("exit", 1.3, 2, 0, how="SIGKILL", code=-9, member=True),
        learned(1.4, 1, 3, [0, 2]),
        step(1.5, 2, 1, {"1": [3]}),
    ]
    assert [round(death.recovery or 0.0, 3) for death in audit(records).deaths] == [0.4, 0.2]


def test_what_a_dead_rank_committed_alone_is_replaced_by_what_the_survivors_made_of_that_step() -> None:
    together, alone = {"0": [0], "1": [1]}, {"0": [0]}
    records = [
        event("epoch", 0.0, 0, epoch=0, num_tickets=2),
        step(1.0, 1, 1, together),
        event("exit", 1.1, 1, 0, how="SIGKILL", code=-9, member=True),
        step(1.2, 1, 0, alone),
        step(1.3, 2, 0, {"0": [1]}),
    ]
    found = audit(records)
    assert (found.conflicts, found.problems()) == ((), [])


def test_last_step_of_ranks_that_all_died_counts_as_the_latest_of_them_tells_it() -> None:
    exits = [event("exit", 2.0, slot, 0, how="SIGKILL", code=-9, member=True) for slot in (0, 1)]
    records = [step(1.0, 1, 0, {"0": [0]}), step(1.1, 1, 1, {"0": [0], "1": [1]}), *exits]
    found = audit(records)
    assert (found.conflicts, found.epochs[0].num_trained) == ((), 2)


def test_a_run_without_a_step_has_an_audit() -> None:
    found = audit([event("exit", 1.0, 0, 0, how="exit code 1", code=1, member=False)])
    assert found.steps == ()
    assert found.median_step is None
    (death,) = found.deaths
    assert (death.member, death.recovery, death.stall, death.respawn) == (False, None, None, None)


def test_a_long_list_of_tickets_is_cut_in_the_sentence() -> None:
    records = [event("epoch", 0.0, 0, epoch=0, num_tickets=20), step(1.0, 1, 0, {"0": [0]})]
    assert audit(records).problems() == ["Epoch 0 trained 1, 2, 3, 4, 5, 6, 7, 8 and 11 more never."]


def test_a_batch_may_make_several_steps_or_none_and_counts_once() -> None:
    accumulated = event("accumulated", 3.0, 0, batch=3, epoch=0, tickets={"0": [2]}, members=[0])
    records = [
        event("epoch", 0.5, 0, epoch=0, num_tickets=3),
        *(step(1.0, 1, slot, {"0": [0], "1": [1]}) for slot in (0, 1)),
        *(step(1.1, 2, slot, {"0": [], "1": []}) for slot in (0, 1)),
        event("exit", 2.5, 1, 0, how="SIGKILL", code=-9, member=True),
        accumulated,
        event("finish", 8.0, code=0, error=None),
    ]
    found = audit(records)
    assert found.problems() == []
    assert found.steps == (1, 2)
    (problem,) = audit([record for record in records if record is not accumulated]).problems()
    assert "2 never" in problem


def test_both_steps_of_a_rank_that_died_in_a_batch_that_the_others_ran_again_do_not_count() -> None:
    found = audit(
        [
            event("epoch", 0.5, 0, epoch=0, num_tickets=2),
            *(step(t, number, 1, tickets) for t, number, tickets in ((1.0, 1, {"0": [0], "1": [1]}), (1.1, 2, {}))),
            event("exit", 1.2, 1, 0, how="SIGKILL", code=-9, member=True),
            *(step(t, number, 0, {"0": tickets}) for t, number, tickets in ((2.0, 1, [0]), (2.1, 2, []), (3.0, 3, [1]))),
            event("finish", 8.0, code=0, error=None),
        ]
    )
    assert found.problems() == []
    assert found.conflicts == ()


def test_a_step_that_lacks_a_part_of_its_constant_global_batch_is_a_problem() -> None:
    begin = event("epoch", 0.5, 0, epoch=0, num_tickets=5, global_batch=2)
    whole = [step(1.0, 1, 0, {"0": [0], "1": [1]}), step(2.0, 2, 0, {"0": [2, 3]}), step(3.0, 3, 0, {"0": [4]})]
    assert audit([begin, *whole]).problems() == []
    torn = [whole[0], step(2.0, 2, 0, {"0": [2]}), step(3.0, 3, 0, {"0": [3, 4]})]
    (problem,) = audit([begin, *torn]).problems()
    assert problem == "The global batch is constant, but steps 2, 3 lack a part of theirs."
