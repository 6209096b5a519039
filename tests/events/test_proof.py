import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import cli
from lightning_ft.events.proof import prove, ranges


def step(slot: int, number: int, tickets: dict[int, list[int]], incarnation: int = 0, **more: Any) -> dict[str, Any]:
    common = {"event": "step", "slot": slot, "incarnation": incarnation, "t": float(number), "step": number, "epoch": 0}
    return {**common, "tickets": tickets, "members": sorted(tickets), **more}


EPOCH = {"event": "epoch", "slot": 0, "incarnation": 0, "t": 0.0, "epoch": 0, "num_tickets": 6}


def test_numbers_are_told_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 9, 11, 20]) == "0-2, 5-11/2, 20"
    assert ranges([0, 5]) == "0, 5"
    assert ranges([]) == ""


def test_a_batch_is_told_with_the_process_that_trained_it() -> None:
    steps = [{0: [0], 1: [1]}, {0: [2]}, {0: [4], 1: [3]}, {0: [5]}]
    events = [step(0, number, tickets) for number, tickets in enumerate(steps, 1)]
    events += [step(1, 1, steps[0]), step(1, 3, steps[2], incarnation=1)]
    (proof,) = prove([EPOCH, *events])
    assert proof.trained == {(0, 0): (0, 2, 4, 5), (1, 0): (1,), (1, 1): (3,)}
    assert (proof.twice, proof.never) == ((), ())
    assert proof.lines()[0] == "epoch 0: 6 of 6 batches trained, twice 0, never 0"


def test_the_command_fails_if_a_batch_was_trained_twice_or_never(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [EPOCH, step(0, 1, {0: [0, 1, 2]}), step(0, 2, {0: [2, 3, 4]})]
    (tmp_path / "slot_0.0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", str(tmp_path)])
    assert "twice: 2\n  never: 5" in capsys.readouterr().out
