"""What the bars show of the live replicas."""

from pathlib import Path

import pytest

from lightning_ft.testing import Fault, FaultPlan, assert_used_up, run_job

SCRIPT = Path(__file__).parent / "jobs" / "barred.py"


@pytest.mark.parametrize("bar", ["tqdm", "rich"])
@pytest.mark.parametrize("victim", [0, 1])
def test_bar_shows_how_many_replicas_are_alive_and_moves_to_the_next_leader(bar, victim, tmp_path):
    plan = FaultPlan([Fault(kind="kill", slot=victim, point="gradients_ready", step=4)])
    result = run_job(SCRIPT, [bar], num_slots=3, faults=plan, directory=tmp_path).check()
    assert_used_up(plan, result.events)
    lines = result.stdout.replace("\r", "\n").splitlines()
    equals = {"tqdm": "=", "rich": ": "}[bar]
    shown = [line for line in lines if f"replicas{equals}" in line]
    assert f"replicas{equals}2/3" in shown[-1]
    assert shown[-1].startswith(f"[slot {1 if victim == 0 else 0}]")
