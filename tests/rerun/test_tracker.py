import math

from lightning_ft.rerun.comparison import relative_difference
from lightning_ft.rerun.tracker import iterations_to_skip


def line(rank: int, iteration: int, status: str = "first_rerun_reproducible", job: str = "N/A") -> str:
    origin = f"ts=2026-01-01 00:00:00 node=a device=0 jobID={job} rank={rank}"
    return f"{origin} iteration={iteration} status={status} result=nan message='m'"


def test_the_same_rank_must_have_failed_twice() -> None:
    assert iterations_to_skip([line(0, 5), line(0, 6), line(1, 5), line(0, 5, "initial_run"), "something else"]) == []
    assert iterations_to_skip([line(0, 5), line(0, 5, "second_rerun_reproducible"), line(0, 6)]) == [5]
    assert iterations_to_skip([line(0, 5), line(0, 5, "second_rerun_not_reproducible")]) == []


def test_an_iteration_in_which_several_ranks_of_a_job_failed_is_kept() -> None:
    assert iterations_to_skip([line(0, 5, job="a"), line(1, 5, job="a"), line(0, 5, job="b")]) == []
    assert iterations_to_skip([line(0, 5, job="a"), line(1, 5, job="b"), line(0, 5, job="c")]) == [5]


def test_ranks_that_failed_in_jobs_without_a_name_do_not_cancel_the_skip() -> None:
    assert iterations_to_skip([line(0, 5), line(1, 5), line(0, 5)]) == [5]


def test_any_two_numbers_are_compared() -> None:
    nan, inf = math.nan, math.inf
    same = [(0.0, -0.0), (nan, nan), (inf, inf), (-inf, -inf), (5e-324, 5e-324), (1.7e308, 1.7e308)]
    assert [relative_difference(*pair) for pair in same] == [0.0] * len(same)
    apart = [(nan, 1.0), (inf, -inf), (inf, 1.0), (nan, inf)]
    assert [relative_difference(*pair) for pair in apart] == [inf] * len(apart)
    assert relative_difference(1.0, -1.0) == relative_difference(0.0, 1.0) == relative_difference(1.7e308, -1.7e308) == 2.0
    assert relative_difference(5e-324, 0.0) == 2.0
    assert 0.0 < relative_difference(1.0, 1.0 + 1e-7) < 2e-7
