"""Who is hung, by an imagined clock."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ft.elastic.options import Policy
from lightning_ft.supervision.hangs import Findings, Limits, Sight, Watch


class Group:
    """Imagined processes that wait for each other; they answer at once unless they are in ``mute``."""

    def __init__(self, size: int, **policy: Any) -> None:
        self.policy = Policy(**policy)
        self.watch = Watch()
        self.sights = {slot: Sight() for slot in range(size)}
        self.does: dict[int, tuple[str, float]] = {}  # what a rank does, and since when
        self.waiting: dict[int, float] = {}
        self.stuck = False
        self.mute: set[int] = set()
        self.stopped: set[int] = set()
        self.now = 100.0
        self.hung: dict[int, str] = {}
        self.hung_at: dict[int, float] = {}
        self.notices: list[str] = []
        self.errors: list[str] = []
        self.retries = 0
        for slot in range(size):
            self.do(slot, "training step")
        self.look()

    def do(self, slot: int, doing: str) -> None:
        self.does[slot] = (doing, self.now)
        self.waiting.pop(slot, None)

    def wait(self, *slots: int) -> None:
        self.waiting |= dict.fromkeys(slots, self.now)
        self.look()

    def arrive(self) -> None:
        """All are there: they go on."""
        self.waiting.clear()
        for slot in self.sights:
            self.do(slot, "training step")
            self.sights[slot].note({"type": "progress", "step": 1}, self.now)
        self.look()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.watch.deadline) is not None and deadline <= end:
            self.now = deadline
            self.look()
            assert self.watch.deadline is None or self.watch.deadline > self.now, "a deadline is not asked for twice"
        self.now = end

    def look(self) -> Findings:
        findings = self.watch.look(self.sights, self.waiting, self.stuck, self.policy, self.now)
        if findings.ask:
            for slot, sight in self.sights.items():
                sight.asked, sight.stopped = self.now, slot in self.stopped
                if slot not in self.mute | self.stopped:
                    doing, since = self.does[slot]
                    quiet = self.now - since
                    sight.note(
                        {"type": "answer", "doing": doing, "quiet": quiet, "place": "x.py:1 in f", "stacks": ""}, self.now
                    )  # type: ignore[typeddict-item]
        for slot, how in findings.hung.items():
            del self.sights[slot]
            self.hung[slot], self.hung_at[slot] = how, self.now
        if findings.hung or findings.retry:
            self.waiting = {}  # they are told of it
            for sight in self.sights.values():
                sight.moved = self.now
        self.notices += findings.notices
        self.errors += [findings.error] if findings.error else []
        self.retries += findings.retry
        return findings


def test_a_rank_is_hung_once_the_others_have_waited_for_the_timeout() -> None:
    group = Group(3, timeout=3.0)
    group.wait(0, 2)
    group.pass_time(2.9)
    assert group.hung == {}
    group.pass_time(0.2)
    assert group.hung == {1: "hung for 3 s, in training step at x.py:1 in f"}
    assert group.hung_at[1] == pytest.approx(103.0)


def test_the_clock_starts_when_the_first_one_waits_or_the_rank_last_moved() -> None:
    group = Group(2, timeout=3.0)
    group.pass_time(50.0)
    group.wait(0)
    group.pass_time(2.0)
    group.do(1, "callbacks")
    group.pass_time(2.9)
    assert group.hung == {}
    group.pass_time(0.2)
    assert list(group.hung) == [1]


def test_a_rank_that_moves_on_for_ever_without_coming_is_bounded_too() -> None:
    group = Group(2, timeout=3.0, stall_timeout=60.0)
    group.wait(0)
    while not group.hung:
        group.do(1, "evaluation step")
        group.pass_time(1.0)
        assert group.now < 163.0
    assert group.now >= 160.0


@pytest.mark.parametrize(
    ("doing", "seconds"),
    [("loader", 60.0), ("training step", 60.0), ("callbacks", 1800.0), ("set-up", 1800.0), ("checkpoint", 1800.0)],
)
def test_without_a_timeout_each_kind_of_work_has_its_own_limit(doing: str, seconds: float) -> None:
    group = Group(3)
    group.do(1, doing)
    group.wait(0, 2)
    group.pass_time(seconds - 1.0)
    assert group.hung == {}
    group.pass_time(2.0)
    assert list(group.hung) == [1]


def test_what_took_long_and_ended_well_may_take_five_times_as_long() -> None:
    group = Group(3)
    group.wait(0, 2)
    group.pass_time(40.0)
    group.arrive()
    group.pass_time(5.0)
    group.wait(0, 2)
    group.pass_time(199.0)
    assert group.hung == {}
    group.pass_time(2.0)
    assert list(group.hung) == [1]


def test_a_limit_that_was_reached_is_doubled_in_case_it_was_wrong() -> None:
    limits = Limits()
    limits.reached("loader")
    assert limits.of("loader", Policy()) == 120.0
    assert limits.of("loader", Policy(timeout=3.0)) == 3.0
    assert limits.of("training step", Policy()) == 60.0


def test_no_limit_that_was_learned_exceeds_the_stall_timeout() -> None:
    limits = Limits()
    limits.observe("callbacks", 5000.0)
    assert limits.of("callbacks", Policy(stall_timeout=3600.0)) == 3600.0


def test_timeouts_of_set_up_and_checkpoints_are_not_shortened_by_that_of_steps() -> None:
    policy = Policy(timeout=3.0, checkpoint_timeout=20.0)
    assert [Limits().of(doing, policy) for doing in ("set-up", "checkpoint", "hand-over")] == [1800.0, 20.0, 20.0]
    assert Limits().of("set-up", Policy(timeout=4000.0)) == 4000.0
    assert Limits().of("set-up", Policy(setup_timeout=5.0)) == 5.0


def test_a_process_that_is_stopped_gets_no_more_time_whatever_it_did() -> None:
    group = Group(3)
    group.do(1, "checkpoint")
    group.stopped = {1}
    group.wait(0, 2)
    group.pass_time(31.0)
    assert group.hung == {1: "hung for 30 s, stopped (SIGSTOP)"}


def test_one_that_stopped_while_it_waited_itself_is_found_with_the_late_one() -> None:
    group = Group(4, timeout=3.0)
    group.wait(0, 2, 3)
    group.stopped = {2}
    group.pass_time(3.1)
    assert set(group.hung) == {1, 2}


def test_a_process_that_does_not_answer_may_be_in_a_callback() -> None:
    group = Group(3)
    group.mute = {1}
    group.wait(0, 2)
    group.pass_time(1799.0)
    assert group.hung == {}
    group.pass_time(2.0)
    assert "does not answer" in group.hung[1]


def test_when_most_do_not_move_nobody_is_killed_but_the_user_is_told_less_and_less_often() -> None:
    group = Group(4, timeout=3.0, stall_timeout=1000.0)
    group.wait(0)
    group.pass_time(500.0)
    assert group.hung == {}
    assert "slot 0 waits; slot 1 in training step at x.py:1 in f; slot 2" in group.notices[0]
    assert 3 <= len(group.notices) <= 8
    group.arrive()
    assert group.notices[-1] == "It goes on after 500 s."
    group.wait(0, 1, 2)
    group.pass_time(3.1)
    assert list(group.hung) == [3], "a stall teaches nothing"


def test_a_stall_ends_with_an_error_that_says_where_each_rank_is() -> None:
    group = Group(4, timeout=3.0, stall_timeout=1000.0)
    group.wait(0)
    group.pass_time(1001.0)
    assert group.errors[0].startswith("Nothing moved for 1000 s (`stall_timeout`): slot 0 waits; slot 1 in training step")


def test_half_of_four_are_hung_but_two_of_three_are_a_stall() -> None:
    for size, is_hung in ((4, True), (3, False), (2, True)):
        group = Group(size, timeout=3.0)
        group.wait(*range(size // 2))
        group.pass_time(10.0)
        assert bool(group.hung) is is_hung


def test_stopped_ones_are_killed_even_if_they_are_most_and_the_rest_goes_on() -> None:
    group = Group(4, timeout=3.0)
    group.stopped = {1, 2, 3}
    group.wait(0)
    group.pass_time(3.1)
    assert set(group.hung) == {1, 2, 3}


def test_not_all_are_killed_even_if_all_stopped_while_one_waited() -> None:
    group = Group(3, timeout=3.0, stall_timeout=100.0)
    group.wait(0)
    group.stopped = {0, 1, 2}
    group.pass_time(99.0)
    assert (group.hung, group.errors) == ({}, [])
    assert "slot 0 stopped (SIGSTOP); slot 1 stopped (SIGSTOP)" in group.notices[0]
    group.pass_time(2.0)
    assert len(group.errors) >= 1


def test_nobody_waits_and_nobody_moves_is_a_stall_unless_all_set_up() -> None:
    group = Group(3)
    group.pass_time(61.0)
    assert (len(group.notices), group.hung) == (1, {})
    for slot in group.sights:
        group.do(slot, "set-up")
    group.pass_time(50_000.0)
    assert (group.errors, group.hung) == ([], {})


def test_all_wait_for_each_other_is_tried_again_without_those_who_do_not_answer() -> None:
    group = Group(3, timeout=3.0)
    group.stuck = True
    group.wait(0, 1, 2)
    group.pass_time(29.0)
    assert (group.hung, group.retries) == ({}, 0)
    group.pass_time(2.0)
    assert (group.hung, group.retries) == ({}, 1)
    group.mute = {2}
    group.wait(0, 1, 2)
    group.pass_time(31.0)
    assert list(group.hung) == [2]


def test_time_in_which_the_supervisor_itself_stood_still_does_not_count() -> None:
    group = Group(2, timeout=3.0)
    group.wait(0)
    group.now += 1000.0
    group.look()
    assert group.hung == {}
    group.pass_time(2.9)
    assert group.hung == {}
    group.pass_time(0.2)
    assert list(group.hung) == [1]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_happens_one_that_waits_and_answers_is_never_killed_and_no_wait_is_endless(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    group = Group(size, timeout=data.draw(st.sampled_from([None, 3.0])), stall_timeout=600.0)
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.sampled_from(sorted(group.sights)))
        match data.draw(st.sampled_from(["wait", "do", "stop", "mute", "arrive"])):
            case "wait":
                group.wait(slot)
            case "do":
                group.do(slot, data.draw(st.sampled_from(["loader", "callbacks", "checkpoint", "training step"])))
            case "stop":
                group.stopped.add(slot)
            case "mute":
                group.mute.add(slot)
            case "arrive":
                group.arrive()
        waiting = set(group.waiting) - group.stopped
        group.pass_time(data.draw(st.floats(0.1, 100.0)))
        assert not waiting & group.hung.keys()
        if len(group.sights) < 2:
            return
    waited_for = set(group.sights) - set(group.waiting)
    if group.waiting and waited_for:
        group.pass_time(2000.0)
        assert group.hung.keys() & waited_for or group.errors
