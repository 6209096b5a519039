import math
from typing import Any

import pytest

from lightning_ft.rerun.findings import PARAMETER_NORM, Finding, of_culprits

LOSS, OWN, NORM = "loss", "own gradient norm", "gradient norm"


def finding(rank: int, name: str, **options: Any) -> Finding:
    place = {"micro_batch": 0} if name == LOSS else {}
    return Finding(rank, name, value=math.nan, **{"sequence": 0, "fatal": True, "shared": name == NORM, **place, **options})


def names(*findings: Finding) -> list[tuple[int, str]]:
    return [(one.rank, one.message) for one in of_culprits(findings)]


def test_what_follows_from_another_value_is_left_out() -> None:
    everywhere = [finding(0, NORM), finding(1, NORM)]
    assert names(*everywhere) == [(0, NORM)]
    assert names(finding(0, LOSS), finding(0, OWN), *everywhere) == [(0, LOSS)]
    assert names(finding(0, LOSS), finding(1, OWN), *everywhere) == [(0, LOSS), (1, OWN)]
    assert names(finding(0, OWN), finding(0, LOSS), finding(0, LOSS, micro_batch=2, sequence=1)) == [(0, LOSS), (0, LOSS)]


def test_all_that_a_step_computes_follows_from_its_parameters() -> None:
    everywhere = [finding(0, NORM), finding(1, NORM)]
    broken = finding(1, PARAMETER_NORM)
    assert names(broken, finding(1, LOSS), finding(1, OWN), *everywhere) == [(1, PARAMETER_NORM)]
    assert names(broken, finding(0, LOSS), *everywhere) == [(1, PARAMETER_NORM), (0, LOSS)]
    large = f"{PARAMETER_NORM} is unexpectedly large"
    assert names(finding(1, large, fatal=False), finding(1, LOSS)) == [(1, large), (1, LOSS)]


@pytest.mark.parametrize("worse", ["fatal", "is_reproduced", "is_still_bad"])
def test_what_is_worse_than_its_cause_is_not(worse: str) -> None:
    mild: dict[str, Any] = {worse: False}
    bad: dict[str, Any] = {worse: True}
    assert names(finding(0, LOSS, **mild), finding(0, NORM, **bad)) == [(0, LOSS), (0, NORM)]
    assert names(finding(0, LOSS, **mild), finding(0, OWN, **bad), finding(0, NORM, **bad)) == [(0, LOSS), (0, OWN)]
    assert names(finding(0, LOSS, **bad), finding(0, OWN, **mild)) == [(0, LOSS)]
