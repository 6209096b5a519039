import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.testing import Fault, FaultPlan, assert_used_up
from lightning_ft.testing.faults import Ledger


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "trip"}, r"`Fault\(kind='trip'\)` is not valid: expected one of kill, stop, exit, raise"),
        ({"point": "lunch"}, r"`Fault\(point='lunch'\)` is not valid: expected one of setup, "),
        ({"point": "healed", "rendezvous": True}, r"rendezvous=True\)` is not valid: not every rank gets there"),
        ({"error": "Oops"}, r"`Fault\(error='Oops'\)` is not valid: expected the name of a builtin exception"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(**{"kind": "kill", "slot": 0, "point": "forward", **fields})


def test_a_plan_survives_the_trip_through_text() -> None:
    faults = [Fault(kind="kill", slot=1, point="forward", step=3), Fault(kind="raise", slot=0, point="healed")]
    plan = FaultPlan(faults, directory="somewhere", timeout=3.0)
    again = FaultPlan.from_json(plan.to_json())
    assert (again.faults, again.directory, again.timeout) == (plan.faults, "somewhere", 3.0)


def test_outside_of_a_job_the_plan_from_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_FT_FAULT_PLAN", raising=False)
    assert FaultPlan.from_environ().faults == ()


@pytest.mark.parametrize(
    ("fault", "code"),
    [("kind='kill'", -9), ("kind='exit', code=5", 5), ("kind='raise', error='SystemExit', code=6", 6)],
)
def test_a_fault_ends_its_process(fault: str, code: int) -> None:
    program = f"from lightning_ft.testing import Fault; Fault(slot=0, point='forward', {fault}).strike()"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == code


def test_an_exception_is_raised_with_its_type_and_message() -> None:
    fault = Fault(kind="raise", slot=0, point="forward", error="KeyError", message="gone")
    with pytest.raises(KeyError, match="gone"):
        fault.strike()


def test_a_fault_fires_once_whoever_asks(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new", timeout=1.0)
    assert not ledger.has_fired(0)
    assert ledger.mark_fired(0)
    assert not Ledger(tmp_path / "new", timeout=1.0).mark_fired(0)
    assert ledger.has_fired(0)
    assert not ledger.has_fired(1)


def test_a_rendezvous_ends_when_all_have_arrived(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, timeout=30.0)
    ledger.arrive(0, slot=0)
    thread = threading.Thread(target=lambda: (ledger.arrive(0, slot=1), ledger.wait_until_fired(0)))
    thread.start()
    ledger.wait_for_others(0, [0, 1])
    assert ledger.mark_fired(0)
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_rendezvous_that_somebody_misses_is_an_error_that_names_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, timeout=0.01)
    ledger.arrive(2, slot=0)
    with pytest.raises(TimeoutError, match=r"fault 2 waited for slots \[1, 3\] for 0.01 s"):
        ledger.wait_for_others(2, [0, 1, 3])
    with pytest.raises(TimeoutError, match="this rank waited for fault 2 to fire"):
        ledger.wait_until_fired(2)


def test_a_plan_is_used_up_once_each_of_its_faults_is_on_record(tmp_path: Path) -> None:
    faults = [Fault(kind="kill", slot=slot, point="forward") for slot in range(2)]
    plan = FaultPlan(faults, directory=str(tmp_path))
    Ledger(tmp_path, 1.0).mark_fired(0)
    with pytest.raises(AssertionError, match=r"never fired:\nFault\(kind='kill', slot=1"):
        assert_used_up(plan)
    assert_used_up(plan, [{"event": "fault", "index": 1}])
