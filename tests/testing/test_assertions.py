from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.testing import (
    assert_every_ticket_once,
    assert_metrics_equal,
    assert_no_violations,
    assert_reconfigurations,
    assert_recovered,
    assert_steps_contiguous,
    assert_weights_equal,
)


def step(number: int, tickets: list[int]) -> dict[str, Any]:
    fields = {"step": number, "epoch": 0, "tickets": {"0": tickets}, "members": [0]}
    return {"t": float(number), "event": "step", "slot": 0, "incarnation": 0, **fields}


def generation(number: int, reason: str, members: list[int], dead: list[int]) -> dict[str, Any]:
    fields = {
        "number": number,
        "reason": reason,
        "members": members,
        "dead": [{"slot": slot, "incarnation": 0} for slot in dead],
    }
    return {"t": number + 0.5, "event": "generation", "slot": None, "incarnation": 0, **fields}


EPOCH = {"t": 0.0, "event": "epoch", "slot": 0, "incarnation": 0, "epoch": 0, "num_tickets": 2}
FINISH = {"t": 9.0, "event": "finish", "slot": None, "incarnation": 0, "code": 0}
DEATH = {"t": 1.5, "event": "exit", "slot": 1, "incarnation": 0, "how": "SIGKILL", "code": -9, "member": True}


def test_tickets_trained_once_pass() -> None:
    assert_every_ticket_once([EPOCH, step(1, [0]), step(2, [1])])


@pytest.mark.parametrize(("tickets", "message"), [([0], "trained 0 twice"), ([], "trained 1 never")])
def test_a_ticket_trained_twice_or_never_fails(tickets: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_every_ticket_once([EPOCH, step(1, [0]), step(2, tickets)])


def test_an_empty_log_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="No rank recorded a step"):
        assert_every_ticket_once([])
    with pytest.raises(AssertionError, match="No rank recorded a step"):
        assert_steps_contiguous([])


def test_a_missing_step_fails() -> None:
    assert_steps_contiguous([step(1, [0]), step(2, [1])], last=2)
    with pytest.raises(AssertionError, match=r"No rank committed steps \[2\]"):
        assert_steps_contiguous([step(1, [0]), step(3, [1])])
    with pytest.raises(AssertionError, match="The last step is 2, not 3"):
        assert_steps_contiguous([step(1, [0]), step(2, [1])], last=3)


def test_the_sequence_of_reconfigurations_is_compared_exactly() -> None:
    events = [
        generation(1, "start", [0, 1], []),
        generation(2, "death", [0], [1]),
        generation(3, "join", [0, 1], []),
    ]
    assert_reconfigurations(events, ["start", "death", "join"])
    assert_reconfigurations(events, ["start", ("death", 1), ("join", 1)])
    for wrong in (["start", "death"], ["start", ("death", 0), "join"], ["start", "join", "death"]):
        with pytest.raises(AssertionError, match="Expected the reconfigurations"):
            assert_reconfigurations(events, wrong)


def test_a_death_without_a_step_after_it_is_no_recovery() -> None:
    events = [step(1, [0]), DEATH, step(2, [1]), FINISH]
    with pytest.raises(AssertionError, match="Nobody committed a step after slot 1 died"):
        assert_recovered(events)
    noticed = {**generation(2, "death", [0], []), "slot": 0, "generation": 2, "stall_ms": 1.0, "joined": []}
    assert_recovered([*events, {**noticed, "t": 1.8, "dead": [[1, "SIGKILL"]]}])


def test_a_job_that_ended_badly_did_not_recover() -> None:
    with pytest.raises(AssertionError, match="ended with code 1"):
        assert_recovered([step(1, [0]), {**FINISH, "code": 1}])


def test_states_are_compared_bit_for_bit() -> None:
    state = {"layer": {"weight": torch.tensor([1.0, 0.0])}, "steps": [torch.tensor(3), 4]}
    assert_weights_equal(state, {"layer": {"weight": torch.tensor([1.0, 0.0])}, "steps": [torch.tensor(3), 4]})
    with pytest.raises(AssertionError, match=r"State 1 differs from state 0 in layer.weight\."):
        assert_weights_equal(state, {**state, "layer": {"weight": torch.tensor([1.0, -0.0])}})
    with pytest.raises(AssertionError, match=r"State 2 differs from state 0 in steps.1\."):
        assert_weights_equal(state, state, {**state, "steps": [torch.tensor(3), 5]})
    with pytest.raises(AssertionError, match="expected at least 2"):
        assert_weights_equal(state)


def test_metrics_files_are_compared_row_by_row(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.csv")]
    for path, text in zip(
        paths, ("step,loss\n1,0.5\n2,0.25\n", "step,loss\n1,0.5\n2,0.2\n", "step,loss\n1,0.5\n"), strict=True
    ):
        path.write_text(text)
    assert_metrics_equal(paths[0], paths[0])
    with pytest.raises(AssertionError, match=r"In row 1 \(step 2\) loss is '0.25' and '0.2'"):
        assert_metrics_equal(paths[0], paths[1])
    with pytest.raises(AssertionError, match="One file has 2 rows, the other 1"):
        assert_metrics_equal(paths[0], paths[2])


def test_violations_of_a_run_are_told(tmp_path: Path) -> None:
    stamp = {"slot": 0, "incarnation": 0}
    events = [{"t": 1.0, "event": "step", "step": step, **stamp} for step in (1, 2, 4)]
    with pytest.raises(AssertionError, match=r"\[steps-contiguous\] No rank committed steps 3\."):
        assert_no_violations(events)
    whole = [*events[:2], {"t": 1.0, "event": "step", "step": 3, **stamp}]
    assert_no_violations(whole)
    saved = {"t": 2.0, "event": "checkpoint", "path": str(tmp_path / "gone.ckpt"), "step": 3, **stamp}
    with pytest.raises(AssertionError, match=r"gone.ckpt: it does not exist"):
        assert_no_violations([*whole, saved])
    assert_no_violations([*whole, saved], checkpoints=False)
