"""Waits for other ranks: what the supervisor hears of them, and how they end."""

import threading
import time
from typing import Any

import pytest

from lightning_ft.elastic.activity import Activity
from lightning_ft.elastic.groups import _SlicedWork
from lightning_ft.elastic.vigil import Vigil
from lightning_ft.errors import GroupBrokenError


class Work:
    """An operation that completes just after the slice in which it was waited for."""

    def __init__(self, error: str = "") -> None:
        self.completed = False
        self.error = error

    def is_completed(self) -> bool:
        self.completed = True
        return True

    def wait(self, timeout: Any) -> None:
        if not self.completed:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_an_operation_that_completes_as_its_slice_ends_has_not_failed() -> None:
    told: list[Any] = []
    vigil = Vigil(1, lambda: False, told.append, 1.0, 60.0)
    _SlicedWork(Work(), vigil).wait()  # type: ignore[arg-type]
    with pytest.raises(GroupBrokenError, match="connection closed"):
        _SlicedWork(Work("connection closed"), vigil).wait()  # type: ignore[arg-type]
    assert told == []


def test_the_supervisor_is_told_once_of_a_long_wait_and_once_of_its_end() -> None:
    told: list[Any] = []
    vigil = Vigil(7, lambda: False, told.append, 0.0, 60.0)
    vigil.still_waiting("others")
    vigil.still_waiting("others")
    vigil.arrived()
    vigil.arrived()
    assert [(message["type"], message["generation"]) for message in told] == [("waiting", 7), ("arrived", 7)]


def test_a_wait_ends_with_its_generation_and_far_later_by_itself() -> None:
    superseded = Vigil(7, lambda: True, lambda message: None, 60.0, 60.0)
    with pytest.raises(GroupBrokenError, match="A newer generation came while this rank waited for others"):
        superseded.still_waiting("others")
    endless = Vigil(7, lambda: False, lambda message: None, 60.0, 0.01)
    with pytest.raises(GroupBrokenError, match="waited 0 s for others and gave up"):
        endless.still_waiting("others")


def test_a_rank_says_what_it_does_since_when_and_where() -> None:
    activity = Activity()
    answers: list[Any] = []

    def answer_once() -> None:
        answers.append(activity.answer())

    def ask() -> Any:
        thread = threading.Thread(target=answer_once)
        thread.start()
        thread.join(timeout=30)
        return answers[-1]

    activity.enter("training step")
    assert ask()["doing"] == "set-up", "the first step may compile the model"
    activity.stepped()
    assert ask()["doing"] == "callbacks"
    with activity.during("checkpoint"):
        before = time.monotonic()
        answer = ask()
        assert answer["doing"] == "checkpoint"
        assert 0 <= answer["quiet"] <= time.monotonic() - before + 30
    assert ask()["doing"] == "callbacks"
    assert "test_vigil.py:" in answer["place"]
    assert answer["place"].endswith("in ask")
    assert "in answer_once" not in answer["stacks"], "the thread that answers is of no interest"
    assert answer["stacks"].startswith("Thread MainThread:\n")
