"""The membership against imagined ranks: by hand for each rule, then by hypothesis for what nobody thought of."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ft.elastic.options import Policy
from lightning_ft.supervision.actions import Action, Finish, Notice, Send, Show, Signal, Spawn
from lightning_ft.supervision.membership import Membership
from lightning_ft.supervision.requests import Request


class Job:
    """Imagined processes around a real membership; checks what must hold at every moment."""

    def __init__(self, num_slots: int, **policy: Any) -> None:
        self.membership = Membership(num_slots, Policy(**policy))
        self.now = 0.0
        self.live: dict[int, int] = {}  # slot -> incarnation
        self.doomed: list[int] = []  # got SIGKILL, not yet gone
        self.signals: list[tuple[int, int]] = []
        self.inbox: dict[int, list[Any]] = {}
        self.generations: list[Any] = []
        self.generation_of: dict[int, int] = {}
        self.ready: set[int] = set()
        self.at_top: set[int] = set()
        self.notices: list[str] = []
        self.shown: list[str] = []
        self.spawned: list[tuple[int, int]] = []
        self.finish: Finish | None = None
        self.settle()

    # What ranks do.

    def say(self, slot: int, kind: str, /, **fields: Any) -> None:
        self.tell(slot, kind, **fields)
        self.settle()

    def tell(self, slot: int, kind: str, /, **fields: Any) -> None:
        if kind == "ready" and fields["generation"] == self.number:
            self.ready.add(slot)
        if kind == "at_top" and fields["generation"] == self.number:
            self.at_top.add(slot)
        self.membership.message(slot, self.live[slot], {"type": kind, **fields}, self.now)  # type: ignore[misc]

    def raises(self, slot: int, exception: str = "ValueError", message: str = "no", code: int = 1, step: int = 1) -> None:
        self.raise_(slot, exception, message, code, step)
        self.exit(slot, code=code)

    def raise_(self, slot: int, exception: str = "ValueError", message: str = "no", code: int = 1, step: int = 1) -> None:
        told = {"exception": exception, "message": message, "traceback": f"{exception}: {message}"}
        self.say(slot, "exception", **told, place="train.py:1", step=step, code=code)

    def exit(self, *slots: int, code: int = 0) -> None:
        for slot in slots:
            self.membership.exited(slot, self.live.pop(slot), code, self.now)
            self.ready.discard(slot)
            self.at_top.discard(slot)
            if slot in self.doomed:
                self.doomed.remove(slot)
        self.settle()

    def kill(self, *slots: int) -> None:
        self.exit(*slots, code=-signal.SIGKILL)

    def bury_doomed(self) -> None:
        while self.doomed:
            self.kill(self.doomed[0])

    # Several ranks at once.

    def begin(self, *slots: int, call: int = 0, fn: str = "fit") -> None:
        for slot in slots:
            self.say(slot, "begin", call=call, fn=fn)

    def connect(self) -> None:
        for slot in self.members:
            self.say(slot, "ready", generation=self.number)

    def train(self) -> None:
        """Bring all from the start into the first step."""
        self.begin(*self.live)
        self.connect()
        for member in self.members:
            self.say(member, "progress", step=1)

    def rejoin(self, slot: int) -> None:
        self.begin(slot)
        assert self.last(slot, "enter")["mode"] == "join"
        self.say(slot, "join", call=0)
        for member in self.members:
            self.say(member, "at_top", generation=self.number)
        self.connect()

    def end(self, *slots: int, call: int = 0) -> None:
        for slot in slots:
            self.say(slot, "end", call=call)

    # What came of it.

    @property
    def number(self) -> int:
        return self.generations[-1]["number"] if self.generations else 0

    @property
    def members(self) -> list[int]:
        return list(self.generations[-1]["members"])

    @property
    def reason(self) -> str:
        return str(self.generations[-1]["reason"])

    def last(self, slot: int, kind: str) -> Any:
        return [message for message in self.inbox[slot] if message["type"] == kind][-1]

    def has(self, slot: int, kind: str, /, **fields: Any) -> bool:
        return any(message.items() >= {"type": kind, **fields}.items() for message in self.inbox[slot])

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline, as the supervisor's selector does."""
        end = self.now + seconds
        while (deadline := self.membership.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.settle()
            assert self.membership.deadline() != deadline, "a deadline that has passed must not be asked for again"
        self.now = end
        self.settle()

    def settle(self) -> None:
        while actions := self.membership.tick(self.now):
            for action in actions:
                self.perform(action)

    def perform(self, action: Action) -> None:
        assert self.finish is None, f"{action} after the end"
        if isinstance(action, Spawn):
            assert action.slot not in self.live
            self.spawned.append((action.slot, action.incarnation))
            self.live[action.slot] = action.incarnation
            self.inbox[action.slot] = []
            self.membership.started(action.slot, action.incarnation, 1000 + action.slot)
        elif isinstance(action, Send):
            self.inbox[action.slot].append(action.message)
            if action.message["type"] == "generation":
                self.check_generation(action.slot, action.message)
            elif action.message["type"] == "go":
                assert action.message["generation"] == self.number
                assert self.ready >= set(self.members), "go before all were ready"
        elif isinstance(action, Signal):
            assert action.slot in self.live
            self.signals.append((action.slot, action.number))
            if action.number == signal.SIGKILL:
                assert action.slot not in self.doomed, "killed twice"
                self.doomed.append(action.slot)
        elif isinstance(action, Notice):
            self.notices.append(action.text)
        elif isinstance(action, Show):
            self.shown.append(action.traceback)
        elif isinstance(action, Finish):
            assert not self.live, "finished while somebody lives"
            self.finish = action

    def check_generation(self, slot: int, message: Any) -> None:
        members = message["members"]
        if message["number"] == self.number:
            assert message == self.generations[-1], "members were told different things"
        else:
            assert message["number"] > self.number
            assert set(members) <= self.live.keys() - set(self.doomed), "a member is dead"
            assert message["incarnations"] == {member: self.live[member] for member in members}
            whole = self.generations[-1]["replicas"] if self.generations else []
            new = [member for member in members if self.generation_of.get(member) != self.live[member]]
            size = self.membership.policy.shard_size
            if message["reason"] != "start" and not message["ending"] and size != "all":
                stayed = [replica for replica in whole if replica in message["replicas"]]
                others = [replica for replica in message["replicas"] if replica not in stayed]
                assert message["replicas"] == stayed + others, "a new replica stands before a senior one"
                assert all(len(replica) == size for replica in message["replicas"])
            if new and message["reason"] != "start":
                assert message["reason"] == "join"
                assert self.at_top >= set(members) - set(new), "admitted in the middle of a step"
            assert members == [member for replica in message["replicas"] for member in replica]
            assert not set(message["orphans"]) & set(members)
            self.generation_of.update({member: self.live[member] for member in members})
            self.generations.append(message)
            self.ready.clear()
            self.at_top.clear()
        assert slot in members or slot in message["orphans"]


# Rule 1: calls.


def test_call_starts_once_all_slots_stand_before_it() -> None:
    job = Job(3)
    job.begin(2, 0)
    assert job.number == 0
    job.begin(1)
    assert (job.members, job.reason) == ([0, 1, 2], "start")
    assert all(job.has(slot, "enter", call=0, mode="start") for slot in range(3))


def test_rank_killed_before_the_start_is_respawned_and_takes_part() -> None:
    job = Job(2)
    job.begin(0)
    job.kill(1)
    assert job.spawned[-1] == (1, 1)
    job.begin(1)
    assert (job.members, job.reason) == ([0, 1], "start")


def test_next_call_starts_in_order_of_seniority() -> None:
    job = Job(3)
    job.train()
    job.kill(0)
    job.rejoin(0)
    assert job.members == [1, 2, 0]
    job.end(0, 1, 2)
    job.begin(0, 1, 2, call=1, fn="test")
    assert (job.members, job.reason) == ([1, 2, 0], "start")
    assert job.has(0, "enter", call=1, mode="start")


def test_latecomer_waits_for_a_fit_and_then_skips_the_calls_before_it() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.end(0, 1)
    job.begin(0, 1, call=1, fn="validate")
    job.connect()
    job.begin(2)
    assert not job.has(2, "enter", call=0)
    job.end(0, 1, call=1)
    job.begin(0, 1, call=2)
    assert job.members == [0, 1]
    assert job.has(2, "enter", call=0, mode="skip")
    job.begin(2, call=1, fn="validate")
    assert job.has(2, "enter", call=1, mode="skip")
    job.begin(2, call=2)
    assert job.has(2, "enter", call=2, mode="join")


def test_slot_lost_while_a_call_was_ending_comes_back_for_the_next_call() -> None:
    job = Job(3)
    job.train()
    job.end(0)
    job.kill(1)
    assert (1, 1) not in job.spawned
    job.end(2)
    job.kill(2)
    job.begin(0, call=1)
    assert job.spawned[-2:] == [(1, 1), (2, 1)]
    assert job.members == [0]


@pytest.mark.parametrize("completed", [True, False])
def test_rank_0_killed_after_the_last_call_is_the_end_of_the_job(completed: bool) -> None:
    job = Job(3)
    job.train()
    job.end(1, 2, *([0] if completed else []))
    job.kill(0)
    job.exit(1, 2)
    assert job.finish is not None
    assert (job.finish.code, str(job.finish.error)[:42]) == (137, "Rank 0 died after the last Trainer call: s")


def test_another_rank_killed_after_the_last_call_is_told_and_no_more() -> None:
    job = Job(3)
    job.train()
    job.end(0, 1, 2)
    job.kill(2)
    job.exit(0, 1)
    assert job.finish == Finish(0, None)
    assert "died (SIGKILL) after its Trainer call" in job.notices[-1]


@pytest.mark.parametrize(("slot", "code"), [(0, 137), (2, 0)])
def test_a_rank_that_is_stopped_after_the_last_call_is_ended_once_another_is_through(slot: int, code: int) -> None:
    job = Job(3, timeout=4.0)
    job.train()
    job.end(0, 1, 2)
    job.membership.found(slot, 0, True)
    job.wait(100.0)  # nobody is through: the others may still do what they like
    job.membership.found(slot, 0, False)
    job.exit(1)
    job.wait(9.0)
    job.membership.found(slot, 0, True)
    job.wait(2.0)
    job.membership.found(slot, 0, False)  # it goes on
    job.wait(100.0)
    assert job.doomed == []
    job.membership.found(slot, 0, True)
    job.wait(1.9)
    assert job.doomed == []
    job.wait(2.2)
    assert job.doomed == [slot]
    job.bury_doomed()
    job.exit(2 - slot)
    assert job.finish is not None
    assert job.finish.code == code
    assert "SIGSTOP" in (job.finish.error or job.notices[-1])


def test_rank_0_killed_between_two_calls_is_a_death_like_any_other() -> None:
    job = Job(3, max_restarts=0)
    job.train()
    job.end(0, 1, 2)
    job.kill(0)
    job.begin(1, 2, call=1)
    job.connect()
    job.end(1, 2, call=1)
    job.exit(1, 2)
    assert job.finish == Finish(0, None)


def test_unfinished_joiner_of_the_call_before_starts_again_which_counts_for_nothing() -> None:
    job = Job(3, max_restarts=1)
    job.train()
    job.kill(2)
    job.begin(2)
    job.say(2, "join", call=0)
    job.end(0, 1)
    job.begin(0, 1, call=1)
    assert job.doomed == [2]
    job.bury_doomed()
    job.wait(1.0)
    assert job.spawned[-1] == (2, 2)


def test_ranks_before_different_calls_end_the_job_instead_of_waiting_for_ever() -> None:
    job = Job(2)
    job.begin(0, fn="fit")
    job.begin(1, fn="test")
    job.bury_doomed()
    assert job.finish is not None
    assert job.finish.code == 1
    assert "fit (call 0), test (call 0)" in str(job.finish.error)


# Rules 2 and 3: deaths.


def test_death_makes_a_generation_without_the_dead_at_once() -> None:
    job = Job(3)
    job.train()
    job.kill(0)
    assert (job.members, job.reason) == ([1, 2], "death")
    assert job.generations[-1]["dead"] == [{"slot": 0, "incarnation": 0, "how": "SIGKILL"}]
    assert job.notices == ["Slot 0 (pid 1000) died (SIGKILL); respawning (1 of 3)."]


def test_deaths_seen_together_make_one_generation() -> None:
    job = Job(4)
    job.train()
    job.kill(1, 3)
    assert (job.number, job.members) == (2, [0, 2])
    assert [death["slot"] for death in job.generations[-1]["dead"]] == [1, 3]


def test_generation_in_which_a_member_dies_before_the_go_never_goes() -> None:
    job = Job(3)
    job.begin(0, 1, 2)
    job.say(0, "ready", generation=1)
    job.say(1, "ready", generation=1)
    job.kill(2)
    assert not job.has(0, "go", generation=1)
    job.say(0, "ready", generation=1)
    job.connect()
    assert job.has(0, "go", generation=2)


# Rule 4: errors.


def test_generation_that_failed_everywhere_is_tried_again_with_the_same_members() -> None:
    job = Job(2)
    job.train()
    job.say(0, "failed", generation=1, reason="reset")
    assert job.number == 1
    job.say(1, "failed", generation=1, reason="reset")
    assert (job.number, job.members, job.reason) == (2, [0, 1], "error")


def fail(job: Job, reason: str) -> None:
    job.connect()
    for slot in job.members:
        job.say(slot, "failed", generation=job.number, reason=reason)


def test_sixth_error_in_a_row_stops_the_job_with_the_first_reason() -> None:
    job = Job(2)
    job.train()
    for attempt in range(5):
        fail(job, f"reason {attempt}")
        job.wait(1.0)
        assert job.number == attempt + 2
    fail(job, "reason 5")
    assert "6 generations failed in a row" in job.last(0, "stop")["message"]
    assert "reason 0" in job.last(1, "stop")["message"]
    job.exit(0, 1, code=1)
    assert job.finish is not None
    assert job.finish.code == 1
    assert "reason 0" in str(job.finish.error)


def test_retries_of_errors_wait_longer_each_time() -> None:
    job = Job(2)
    job.train()
    fail(job, "no")
    fail(job, "no")
    assert job.number == 2
    job.wait(0.06)
    assert job.number == 3
    fail(job, "no")
    job.wait(0.06)
    assert job.number == 3
    job.wait(0.06)
    assert job.number == 4


def test_progress_between_errors_forgives_them() -> None:
    job = Job(2)
    job.train()
    for _ in range(12):
        fail(job, "no")
        job.wait(1.0)
        job.say(0, "progress", step=2)
    assert job.number == 13


def test_member_that_does_not_report_what_the_others_report_is_killed_as_hung() -> None:
    job = Job(3, timeout=5.0)
    job.train()
    job.say(0, "failed", generation=1, reason="no answer")
    job.say(2, "failed", generation=1, reason="no answer")
    job.wait(4.9)
    assert job.doomed == []
    job.wait(0.2)
    assert job.doomed == [1]
    assert (job.members, job.reason) == ([0, 2], "death")
    assert job.generations[-1]["dead"][0]["how"] == "hung for 5 s, does not answer, last seen in callbacks"
    job.bury_doomed()
    assert job.number == 2
    assert (1, 1) in job.spawned


def test_those_who_hold_the_state_are_not_all_ended_for_keeping_joiners_waiting() -> None:
    job = Job(4, timeout=5.0)
    job.train()
    job.kill(1, 2)
    job.connect()
    for slot in (1, 2):
        job.begin(slot)
        job.say(slot, "join", call=0)
    for slot in (0, 3):
        job.say(slot, "at_top", generation=job.number)
    assert (job.members, job.reason) == ([0, 3, 1, 2], "join")
    for slot in (1, 2):
        job.say(slot, "ready", generation=job.number)
    job.wait(6.0)
    assert job.doomed == []
    assert (job.members, job.reason) == ([0, 3, 1, 2], "error")


# Rule 5: joins.


def test_joiner_is_admitted_last_once_all_members_wait_at_the_top() -> None:
    job = Job(3)
    job.train()
    job.kill(0)
    job.connect()
    job.begin(0)
    assert job.has(0, "enter", call=0, mode="join")
    assert not job.has(1, "join_wanted")
    job.say(0, "join", call=0)
    assert job.last(1, "join_wanted")["value"] is True
    job.say(1, "at_top", generation=2)
    assert job.number == 2
    job.say(2, "at_top", generation=2)
    assert (job.members, job.reason) == ([1, 2, 0], "join")
    assert job.last(1, "join_wanted")["value"] is False
    assert job.generations[-1]["incarnations"] == {1: 0, 2: 0, 0: 1}


def test_simultaneous_joiners_are_ordered_by_slot() -> None:
    job = Job(4)
    job.train()
    job.kill(0, 2)
    job.connect()
    for slot in (2, 0):
        job.begin(slot)
        job.say(slot, "join", call=0)
    for slot in (1, 3):
        job.say(slot, "at_top", generation=2)
    assert job.members == [1, 3, 0, 2]


def test_wait_for_a_joiner_that_died_is_called_off() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.connect()
    job.begin(2)
    job.say(2, "join", call=0)
    job.say(0, "at_top", generation=2)
    job.kill(2)
    assert job.last(1, "join_wanted")["value"] is False
    assert job.number == 2
    job.say(1, "at_top", generation=2)
    assert (job.members, job.reason) == ([0, 1], "cancelled")


def test_death_of_a_member_at_the_top_keeps_the_joiner_waiting() -> None:
    job = Job(4)
    job.train()
    job.kill(3)
    job.connect()
    job.begin(3)
    job.say(3, "join", call=0)
    job.say(0, "at_top", generation=2)
    job.kill(1)
    assert (job.members, job.reason) == ([0, 2], "death")
    assert job.last(0, "join_wanted")["value"] is True
    job.connect()
    for slot in (0, 2):
        job.say(slot, "at_top", generation=3)
    assert (job.members, job.reason) == ([0, 2, 3], "join")


def test_joiner_stays_a_member_when_another_dies_before_the_go() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.connect()
    job.begin(2)
    job.say(2, "join", call=0)
    for slot in (0, 1):
        job.say(slot, "at_top", generation=2)
    job.kill(0)
    assert (job.members, job.reason) == ([1, 2], "death")


# Rule 6: min_replicas.


def test_too_few_members_hold_until_enough_joined() -> None:
    job = Job(3, min_replicas=3)
    job.train()
    job.kill(1, 2)
    assert job.generations[-1]["hold"] is True
    job.connect()
    job.say(0, "at_top", generation=2)
    job.begin(1)
    job.say(1, "join", call=0)
    assert job.number == 2
    job.begin(2)
    job.say(2, "join", call=0)
    assert (job.members, job.generations[-1]["hold"]) == ([0, 1, 2], False)
    job.wait(1000.0)
    assert not job.has(0, "stop")


def test_too_few_members_for_too_long_stop_the_job() -> None:
    job = Job(2, min_replicas=2, rejoin_timeout=60.0)
    job.train()
    job.kill(1)
    job.connect()
    job.wait(59.0)
    assert not job.has(0, "stop")
    job.wait(2.0)
    assert "1 alive, 2 needed" in job.last(0, "stop")["message"]
    job.raises(0, "StoppedError")
    job.exit(1, code=1)
    assert job.finish is not None
    assert job.finish.code == 1
    assert "60 s" in str(job.finish.error)
    assert job.shown == []


def test_too_few_members_with_no_respawn_left_stop_the_job_at_once() -> None:
    job = Job(2, min_replicas=2, max_restarts=0)
    job.train()
    job.kill(1)
    assert "may not start again" in job.last(0, "stop")["message"]


def test_rank_that_ignores_the_stop_is_killed_after_the_grace() -> None:
    job = Job(2, min_replicas=2, max_restarts=0, grace=10.0)
    job.train()
    job.kill(1)
    job.wait(9.0)
    assert job.doomed == []
    job.wait(2.0)
    job.bury_doomed()
    assert job.finish is not None


# Ranks that hang.


def test_member_that_never_becomes_ready_is_removed_after_the_timeout() -> None:
    job = Job(3, timeout=5.0)
    job.train()
    job.kill(2)
    assert job.members == [0, 1]
    job.tell(0, "ready", generation=job.number)
    job.wait(4.0)
    assert 1 in job.live
    job.wait(1.5)
    assert job.members == [0]


def test_member_that_never_comes_to_the_step_boundary_is_removed_after_the_timeout() -> None:
    job = Job(3, timeout=5.0)
    job.train()
    for slot in (0, 2):
        job.tell(slot, "at_top", generation=job.number)
    job.wait(5.5)
    assert job.members == [0, 2]


def test_respawned_process_that_never_gets_ready_to_join_is_ended_for_the_sake_of_its_slot() -> None:
    job = Job(2, setup_timeout=50.0)
    job.train()
    job.kill(1)
    job.say(0, "ready", generation=job.number)
    job.begin(1)
    job.wait(49.0)
    assert 1 in job.live
    job.wait(2.0)
    assert job.doomed == [1]
    assert job.members == [0]
    job.bury_doomed()
    job.wait(1.0)
    assert job.spawned[-1] == (1, 2)


def test_respawned_process_that_is_stopped_is_ended_sooner() -> None:
    job = Job(2)
    job.train()
    job.kill(1)
    job.say(0, "ready", generation=job.number)
    job.begin(1)
    job.membership.found(1, job.live[1], True)
    job.settle()
    assert job.doomed == [1]


# Rule 7: respawns.


def test_slot_that_took_part_in_a_step_is_respawned_at_once_however_often_it_died() -> None:
    job = Job(2, max_restarts=10)
    job.train()
    for incarnation in range(1, 5):
        job.kill(1)
        assert job.spawned[-1] == (1, incarnation)
        job.rejoin(1)
        job.tell(1, "progress", step=incarnation)


def test_respawns_of_a_slot_wait_longer_each_time_and_end_at_the_limit() -> None:
    job = Job(2, max_restarts=4)
    job.train()
    delays = []
    for _ in range(4):
        job.kill(1)
        start = job.now
        while 1 not in job.live:
            deadline = job.membership.deadline()
            assert deadline is not None
            job.wait(deadline - job.now)
        delays.append(job.now - start)
    assert delays == [0.0, 0.5, 1.0, 2.0]
    job.kill(1)
    assert job.notices[-1] == "Slot 1 (pid 1001) died (SIGKILL); it stays out after 4 respawns."
    job.wait(1000.0)
    assert 1 not in job.live
    assert job.members == [0]


def test_respawns_older_than_the_window_do_not_count() -> None:
    job = Job(2, max_restarts=1, restart_window=100.0)
    job.train()
    job.kill(1)
    job.wait(101.0)
    job.kill(1)
    assert job.spawned[-1] == (1, 2)
    job.kill(1)
    job.wait(1000.0)
    assert job.spawned[-1] == (1, 2)


def test_no_respawns_are_made_when_they_are_not_wanted() -> None:
    job = Job(2, max_restarts=0)
    job.train()
    job.kill(1)
    assert job.notices == ["Slot 1 (pid 1001) died (SIGKILL); it stays out."]
    assert (job.members, job.live) == ([0], {0: 0})


def test_first_options_hold_until_a_call_starts_and_then_those_of_the_call() -> None:
    job = Job(2)

    def ask(slot: int, max_restarts: int) -> int:
        fields = Policy(max_restarts=max_restarts).to_message()
        job.say(slot, "options", **{name: value for name, value in fields.items() if name != "type"})
        return job.membership.policy.max_restarts

    assert (ask(0, 0), ask(1, 9)) == (0, 0)
    job.train()
    assert job.membership.policy.max_restarts == 0
    job.end(0, 1)
    assert (ask(1, 5), ask(0, 5)) == (0, 0)
    job.begin(0, 1, call=1)
    assert job.membership.policy.max_restarts == 5


# Rule 8: exceptions.


def test_exception_before_the_first_step_ends_the_job_and_is_shown_once() -> None:
    job = Job(3)
    job.begin(0, 1, 2)
    job.raise_(1)
    job.raise_(0, "KeyError", "peer")
    assert job.doomed == [0, 2]
    job.exit(1, code=1)
    job.bury_doomed()
    assert job.finish == Finish(1, "Slot 1 raised ValueError before the first step.")
    assert job.shown == ["ValueError: no"]
    assert len(job.spawned) == 3


def test_exit_code_before_the_first_step_ends_the_job_with_it() -> None:
    job = Job(2)
    job.exit(1, code=7)
    job.bury_doomed()
    assert job.finish == Finish(7, "Slot 1 ended before the first step (exit code 7).")


def test_rank_that_cannot_end_after_its_exception_is_killed_after_the_grace() -> None:
    job = Job(2, grace=5.0)
    job.raise_(1, code=3)
    job.bury_doomed()
    job.wait(6.0)
    job.bury_doomed()
    assert job.finish is not None
    assert job.finish.code == 3


def test_exception_after_the_first_step_is_a_death() -> None:
    job = Job(3)
    job.train()
    job.raises(1)
    assert job.generations[-1]["dead"] == [{"slot": 1, "incarnation": 0, "how": "ValueError: no"}]
    assert job.spawned[-1] == (1, 1)
    assert job.shown == ["ValueError: no"]


def test_exception_that_every_member_raises_is_not_tried_again() -> None:
    job = Job(3)
    job.train()
    job.raises(1)
    job.raises(0)
    job.raises(2)
    job.bury_doomed()
    assert job.finish is not None
    assert job.finish.code == 1
    assert "every other member" in str(job.finish.error)
    assert job.shown == ["ValueError: no"]


def test_exceptions_of_all_members_in_the_same_step_are_the_same_whatever_they_say_and_whenever_it_is_heard() -> None:
    job = Job(3)
    job.train()
    for slot in (2, 0, 1):
        job.say(slot, "progress", step=7)
        job.raise_(slot, message=f"in slot {slot}", step=7)
    assert job.last(0, "stop")
    job.exit(0, 1, 2, code=1)
    assert job.finish == Finish(1, "Slot 1 raised ValueError, and so did every other member, without a step in between.")


def test_exceptions_of_all_members_in_different_steps_are_deaths() -> None:
    job = Job(2)
    job.train()
    job.raises(1, step=1)
    job.rejoin(1)
    job.say(0, "progress", step=2)
    job.raises(0, step=2)
    assert job.spawned[-2:] == [(1, 1), (0, 1)]
    assert job.members == [1]


def test_others_go_on_at_once_when_a_rank_says_what_it_raised() -> None:
    job = Job(3)
    job.train()
    job.raise_(1)
    assert job.members == [0, 2]
    assert len(job.spawned) == 3, "its place is not free yet"
    job.exit(1, code=1)
    assert job.spawned[-1] == (1, 1)


def test_others_wait_for_rank_0_which_may_write_a_checkpoint_of_what_it_raised() -> None:
    job = Job(3, grace=5.0)
    job.train()
    job.raise_(0)
    assert job.members == [0, 1, 2]
    job.wait(6.0)
    assert job.doomed == [0]
    job.bury_doomed()
    assert job.members == [1, 2]
    assert job.spawned[-1] == (0, 1)


def test_exception_that_goes_on_in_another_slot_once_it_used_up_one_ends_the_job() -> None:
    job = Job(3, max_restarts=1)
    job.train()
    job.raises(2, message="sample 7")
    job.rejoin(2)
    job.say(0, "progress", step=2)
    job.raises(2, message="sample 7", step=2)
    assert job.notices[-1].endswith("it stays out after 1 respawn.")
    job.say(0, "progress", step=3)
    job.raise_(1, message="sample 7, as the epoch ends", step=3)
    assert job.last(0, "stop")
    job.exit(1, 0, code=1)
    assert job.finish == Finish(1, "ValueError: sample 7, as the epoch ends in slot 1, as in slot 2 before.")
    assert job.shown == ["ValueError: sample 7", "ValueError: sample 7, as the epoch ends"]


def test_what_is_raised_while_an_exception_is_handled_is_shown_too() -> None:
    job = Job(3)
    job.train()
    job.raise_(1)
    job.raise_(1)
    job.raise_(1, "KeyError", "in on_exception")
    assert job.shown == ["ValueError: no", "KeyError: in on_exception"]
    job.exit(1, code=1)
    assert job.generations[-1]["dead"] == [{"slot": 1, "incarnation": 0, "how": "ValueError: no"}]


def test_exception_that_keeps_ranks_from_coming_back_is_nothing_to_the_others() -> None:
    job = Job(4, max_restarts=1)
    job.train()
    for slot in (2, 3):
        job.kill(slot)
        job.begin(slot)
        job.raises(slot)
        assert job.notices[-1].endswith("it stays out after 1 respawn.")
    assert job.members == [0, 1]
    assert job.finish is None
    assert job.shown == ["ValueError: no"]


def test_reason_of_a_signal_is_told_if_it_is_known() -> None:
    job = Job(2)
    job.train()
    job.membership.exited(1, 0, -signal.SIGKILL, job.now, "the kernel ran out of memory")
    job.live.pop(1)
    job.settle()
    assert "died (SIGKILL: the kernel ran out of memory); respawning" in job.notices[-1]


def test_exception_that_the_script_catches_leaves_the_rank_in_the_next_call() -> None:
    job = Job(2, grace=5.0)
    job.train()
    job.raise_(1)
    job.begin(1, call=1, fn="test")
    job.wait(6.0)
    job.end(0)
    job.begin(0, call=1, fn="test")
    assert job.members == [0, 1]


def test_first_exception_explains_the_end_when_all_are_gone() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.raises(1, "ValueError", code=3)
    job.raises(0, "ConnectionError")
    job.bury_doomed()
    assert job.finish == Finish(3, "The job ended with slot 1 (ValueError: no).")


def test_signals_explain_the_end_when_all_were_killed() -> None:
    job = Job(2, max_restarts=0)
    job.train()
    job.kill(0, 1)
    assert job.finish == Finish(137, "All ranks are gone: slot 0 (SIGKILL), slot 1 (SIGKILL).")


def test_death_that_was_healed_does_not_explain_a_later_end() -> None:
    job = Job(2, max_restarts=1)
    job.train()
    job.raises(1)
    job.rejoin(1)
    job.say(0, "progress", step=2)
    job.kill(0, 1)
    job.kill(0)
    assert job.finish is not None
    assert job.finish.code == 137


# Rule 9: the end.


def test_job_whose_ranks_complete_ends_with_zero() -> None:
    job = Job(2)
    job.train()
    job.end(0, 1)
    job.exit(0)
    assert job.finish is None
    job.exit(1)
    assert job.finish == Finish(0, None)


def test_job_that_never_calls_a_trainer_ends_with_zero() -> None:
    job = Job(2)
    job.exit(0, 1)
    assert job.finish == Finish(0, None)


def test_abort_signal_at_exit_after_the_last_call_is_not_a_death() -> None:
    job = Job(2)
    job.train()
    job.end(0, 1)
    job.say(0, "bye")
    job.exit(0, code=-signal.SIGABRT)
    job.exit(1)
    assert job.finish == Finish(0, None)


def test_exit_code_after_the_last_call_is_the_jobs() -> None:
    job = Job(2)
    job.train()
    job.end(0, 1)
    job.exit(0)
    job.raises(1, code=4)
    assert job.finish == Finish(4, "The job ended with slot 1 (ValueError: no).")
    assert job.shown == ["ValueError: no"]


def test_member_that_dies_while_the_call_is_ending_is_not_replaced() -> None:
    job = Job(3)
    job.train()
    job.end(0)
    job.kill(1)
    assert (job.members, job.reason) == ([2], "death")
    assert len(job.spawned) == 3
    job.end(2)
    job.exit(0, 2)
    assert job.finish == Finish(0, None)


def test_members_do_not_wait_for_one_that_completed_the_call() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.end(0)
    assert (job.members, job.reason) == ([1], "death")
    job.connect()
    job.say(1, "failed", generation=3, reason="alone")
    assert (job.members, job.reason) == ([1], "error")


def test_joiners_are_killed_quietly_once_every_member_is_done() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.begin(2)
    job.end(0, 1)
    job.exit(0)
    assert job.doomed == []
    job.exit(1)
    assert job.doomed == [2]
    job.bury_doomed()
    assert job.finish == Finish(0, None)
    assert len(job.notices) == 1


def test_pending_respawn_does_not_keep_a_finished_job_alive() -> None:
    job = Job(2)
    job.train()
    job.kill(1)
    job.kill(1)
    job.end(0)
    job.exit(0)
    assert job.finish == Finish(0, None)


def test_member_that_ends_itself_with_zero_is_not_replaced() -> None:
    job = Job(2)
    job.train()
    job.exit(1)
    assert (job.members, job.generations[-1]["dead"][0]["how"]) == ([0], "exit code 0")
    assert 1 not in job.live


# Rule 10: signals, and exclusion.


def test_termination_is_forwarded_once_and_not_answered_with_respawns() -> None:
    job = Job(2)
    job.train()
    job.membership.signalled(signal.SIGTERM, job.now)
    job.settle()
    assert job.signals == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    job.exit(0, code=-signal.SIGTERM)
    assert job.members == [1]
    job.exit(1, code=143)
    assert job.finish == Finish(143, None)
    assert len(job.spawned) == 2


def test_rank_that_outlives_the_grace_is_killed() -> None:
    job = Job(2, grace=30.0)
    job.train()
    job.membership.signalled(signal.SIGINT, job.now)
    job.wait(10.0)
    job.membership.signalled(signal.SIGINT, job.now)
    job.wait(0.9)
    assert job.doomed == []
    job.wait(0.2)
    job.bury_doomed()
    assert job.finish == Finish(130, None)


def test_termination_that_comes_twice_is_forwarded_once_and_keeps_its_grace() -> None:
    job = Job(2, grace=30.0)
    job.train()
    job.membership.signalled(signal.SIGTERM, job.now)
    job.wait(0.05)
    job.membership.signalled(signal.SIGTERM, job.now)
    job.settle()
    assert job.signals == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    job.wait(20.0)
    job.membership.signalled(signal.SIGTERM, job.now)
    job.wait(9.0)
    assert job.doomed == []
    job.wait(1.5)
    assert job.doomed == [0, 1]


def test_signal_to_one_rank_is_meant_for_the_job() -> None:
    job = Job(3)
    job.train()
    job.say(1, "asked", signal=signal.SIGTERM)
    job.say(2, "asked", signal=signal.SIGTERM)  # it received what was passed on
    job.settle()
    assert job.signals == [(0, signal.SIGTERM), (2, signal.SIGTERM)]
    job.exit(0, 1, 2, code=143)
    assert job.finish == Finish(143, None)
    assert len(job.spawned) == 3


def test_rank_that_starts_again_is_not_awaited_when_the_others_stop() -> None:
    job = Job(3)
    job.train()
    job.kill(2)
    job.begin(2)
    job.say(0, "exception", exception="SIGTERMException", message="143", traceback="", code=143)
    assert job.doomed == [2]


def test_rank_that_dies_of_a_termination_takes_the_job_along() -> None:
    job = Job(2)
    job.train()
    job.exit(1, code=-signal.SIGTERM)
    assert job.signals == [(0, signal.SIGTERM)]
    job.exit(0, code=143)
    assert job.finish == Finish(143, None)
    assert len(job.spawned) == 2


def test_job_that_waits_for_ranks_and_is_asked_to_stop_does_not_wait_on() -> None:
    job = Job(2, min_replicas=2)
    job.train()
    job.kill(1)
    assert job.generations[-1]["hold"]
    job.say(0, "ready", generation=job.generations[-1]["number"])
    job.membership.signalled(signal.SIGTERM, job.now)
    job.say(0, "at_top", generation=job.generations[-1]["number"])
    assert job.generations[-1]["reason"] == "cancelled"
    assert not job.generations[-1]["hold"]


@pytest.mark.parametrize(("timeout", "longest"), [(None, 5.0), (2.0, 2.0), (60.0, 5.0)])
def test_rank_that_is_stopped_when_the_job_is_asked_to_stop_leaves_the_others_half_of_the_grace(
    timeout: float | None, longest: float
) -> None:
    job = Job(3, grace=10.0, timeout=timeout)
    job.train()
    job.membership.found(1, job.live[1], True)
    for slot in (0, 2):
        job.say(slot, "waiting", generation=job.number, seconds=0.5)
    job.wait(0.5)
    job.membership.signalled(signal.SIGTERM, job.now)
    job.wait(longest - 0.1)
    assert job.doomed == []
    job.wait(0.2 + longest / 5)  # they are asked now and then only
    assert job.doomed == [1]
    assert job.members == [0, 2]


def test_job_that_ends_well_in_spite_of_a_termination_keeps_its_own_code() -> None:
    job = Job(2)
    job.train()
    job.membership.signalled(signal.SIGTERM, job.now)
    job.end(0, 1)
    job.exit(0, 1)
    assert job.finish == Finish(0, None)


def test_user_signal_is_forwarded_and_changes_nothing() -> None:
    job = Job(2)
    job.train()
    job.membership.signalled(signal.SIGUSR1, job.now)
    job.settle()
    assert job.signals == [(0, signal.SIGUSR1), (1, signal.SIGUSR1)]
    job.kill(1)
    assert job.spawned[-1] == (1, 1)


def test_ranks_of_one_replica_that_are_excluded_together_are_all_told_so_in_one_change() -> None:
    job = Job(4, shard_size=2)
    job.train()
    job.kill(2)
    job.connect()
    job.say(0, "progress", step=2)
    job.bury_doomed()
    job.begin(2, 3)
    for slot in (2, 3):
        job.say(slot, "join", call=0)
    for member in job.members:
        job.say(member, "at_top", generation=job.number)
    job.connect()  # 2 and 3 are members again, and have completed no step since
    job.say(3, "exclude", slots=[2, 3], reason="wrong sums")
    job.tell(2, "exclude", slots=[2, 3], reason="wrong sums")  # on its way by then
    assert job.doomed == [2, 3]
    assert (job.members, job.reason) == ([0, 1], "exclude")
    job.bury_doomed()
    for slot in (2, 3):
        assert f"Slot {slot} (pid {1000 + slot}) died (excluded: wrong sums); respawning (" in "".join(job.notices)


def test_excluded_slot_is_killed_and_left_out_before_it_is_gone() -> None:
    job = Job(3)
    job.train()
    job.say(0, "exclude", slots=[1], reason="wrong sums")
    assert job.doomed == [1]
    assert (job.members, job.reason) == ([0, 2], "exclude")
    assert job.generations[-1]["dead"][0]["how"] == "excluded: wrong sums"
    job.bury_doomed()
    assert job.number == 2
    assert job.spawned[-1] == (1, 1)


def test_words_of_an_earlier_incarnation_are_ignored() -> None:
    job = Job(2)
    job.train()
    job.kill(1)
    job.membership.message(1, 0, {"type": "begin", "call": 0, "fn": "fit"}, job.now)
    job.membership.exited(1, 0, 0, job.now)
    job.settle()
    assert job.inbox[1] == []
    assert job.live == {0: 0, 1: 1}


# Anything else.


class Chaos(Job):
    """Ranks that do whatever a rank may do next, in any order, and die at any time."""

    def __init__(self, num_slots: int, num_calls: int, **policy: Any) -> None:
        self.num_calls = num_calls
        self.state: dict[int, str] = {}
        self.call: dict[int, int] = {}
        self.seen: dict[int, int] = {}  # messages read
        self.mine: dict[int, int] = {}  # generation that the rank is in
        self.step: dict[int, int] = {}
        self.top_at: dict[int, int] = {}  # generation -> step at which its members agreed to stop
        super().__init__(num_slots, **policy)

    def perform(self, action: Action) -> None:
        super().perform(action)
        if isinstance(action, Spawn):
            slot = action.slot
            self.state[slot], self.call[slot], self.seen[slot], self.mine[slot] = "script", 0, 0, 0
            self.step[slot] = 0

    def choices(self) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        for slot in sorted(self.live):
            if slot in self.doomed:
                choices.append(lambda slot=slot: self.kill(slot))
            elif self.seen[slot] < len(self.inbox[slot]):
                choices.append(lambda slot=slot: self.read(slot))
            elif self.state[slot] not in ("standing", "entering", "ready", "top", "joined", "orphan"):
                choices.append(lambda slot=slot: self.go_on(slot))
        return choices

    def read(self, slot: int) -> None:
        message = self.inbox[slot][self.seen[slot]]
        self.seen[slot] += 1
        if message["type"] == "enter":
            self.state[slot] = {"join": "joining", "skip": "script"}.get(message["mode"], "entering")
            self.call[slot] += message["mode"] == "skip"
        elif message["type"] == "generation":
            if self.state[slot] != "script":  # else it completed the call before it heard
                self.mine[slot] = message["number"]
                self.state[slot] = "unready" if slot in message["members"] else "orphan"
                if message["reason"] == "join":
                    self.step[slot] = max(self.step[member] for member in message["members"])
        elif message["type"] == "go":
            if self.mine[slot] == message["generation"] and self.state[slot] == "ready":
                self.state[slot] = "training"
        elif message["type"] == "stop":
            self.exit(slot, code=1)

    def go_on(self, slot: int) -> None:
        state = self.state[slot]
        if state == "script":
            if self.call[slot] == self.num_calls:
                self.exit(slot)
            else:
                self.state[slot] = "standing"
                self.say(slot, "begin", call=self.call[slot], fn="fit")
        elif state == "joining":
            self.state[slot] = "joined"
            self.say(slot, "join", call=self.call[slot])
        elif state == "unready":
            self.state[slot] = "ready"
            self.say(slot, "ready", generation=self.mine[slot])
        elif state == "training":
            self.train_on(slot)

    def train_on(self, slot: int) -> None:
        """Take a step, which stands for everything that members do together: only if all are in this generation."""
        number = self.mine[slot]
        if number != self.number:
            return  # interrupted; the news is on its way
        peers = self.members
        if any(self.mine.get(peer) != number or self.state.get(peer) not in ("training", "top") for peer in peers):
            return
        wanted = any(m["type"] == "join_wanted" and m["value"] for m in self.inbox[slot][-1:])
        hold = self.generations[-1]["hold"]
        if number in self.top_at or wanted or hold:
            self.top_at[number] = 1
            self.state[slot] = "top"
            self.say(slot, "at_top", generation=number)
            return
        self.step[slot] += 1
        self.say(slot, "progress", step=self.step[slot])
        if self.step[slot] >= 3 * (self.call[slot] + 1) and number not in self.top_at:
            self.complete(peers)

    def complete(self, peers: list[int]) -> None:
        """The final barrier, and what each does after it."""
        for peer in peers:
            if peer in self.live and peer not in self.doomed and self.state[peer] == "training":
                self.state[peer] = "script"
                self.step[peer] = 3 * (self.call[peer] + 1)
                self.say(peer, "end", call=self.call[peer])
                self.call[peer] += 1


FAULTS = ("kill",) * 6 + ("retire", "fail", "fail all", "raise", "exclude", "wait", "wait", "term")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_order_of_events_ends_in_a_consistent_state(data: st.DataObject) -> None:
    shard_size = data.draw(st.sampled_from([1, 1, 2, 3, "all"]))
    num_replicas = data.draw(st.integers(1, 4 if shard_size in (1, "all") else 6 // shard_size))
    job = Chaos(
        num_slots=num_replicas if shard_size == "all" else num_replicas * shard_size,
        shard_size=shard_size,
        num_calls=data.draw(st.integers(1, 2)),
        max_restarts=data.draw(st.integers(0, 3)),
        min_replicas=data.draw(st.integers(1, 2)),
        timeout=data.draw(st.sampled_from([None, 5.0])),
        rejoin_timeout=60.0,
    )
    for _ in range(data.draw(st.integers(0, 150))):
        if job.finish is not None:
            break
        choices = job.choices()
        if choices and data.draw(st.integers(0, 11)):
            data.draw(st.sampled_from(choices))()
        else:
            inject(job, data)
    for _ in range(2000):  # no more faults: it has to end by itself
        if job.finish is not None:
            break
        choices = job.choices()
        for choice in choices:
            before = job.number
            choice()
            if job.finish is not None or job.number != before:
                break
        job.wait(1.0)
        release_hung(job)
    assert job.finish is not None, f"it goes on for ever: {job.state}, {job.generations[-1:]}"


def inject(job: Chaos, data: st.DataObject) -> None:
    slots = sorted(job.live.keys() - set(job.doomed))
    fault = data.draw(st.sampled_from(FAULTS))
    if fault == "wait":
        job.wait(data.draw(st.sampled_from([0.1, 1.0, 10.0])))
    elif fault == "term":
        job.membership.signalled(signal.SIGTERM, job.now)
        job.settle()
    elif not slots:
        return
    elif fault == "kill":
        job.kill(data.draw(st.sampled_from(slots)))
    elif fault == "raise":
        job.raises(data.draw(st.sampled_from(slots)), message=data.draw(st.sampled_from("ab")))
    elif fault == "retire":
        new = [slot for slot in slots if job.state[slot] in ("unready", "orphan") and job.membership.policy.shard_size != 1]
        if new:
            job.say(data.draw(st.sampled_from(new)), "retire")
    elif fault == "exclude":
        odd = data.draw(st.lists(st.sampled_from(slots), min_size=1, max_size=2, unique=True))
        job.say(data.draw(st.sampled_from(slots)), "exclude", slots=odd, reason="odd")
    else:
        training = [slot for slot in slots if job.state[slot] == "training" and job.mine[slot] == job.number]
        for slot in training if fault == "fail all" else training[:1]:
            job.state[slot] = "ready"  # waits for the next generation
            job.say(slot, "failed", generation=job.mine[slot], reason="reset")


def release_hung(job: Chaos) -> None:
    """A failure that only some saw: the others run into the same one sooner or later."""
    for slot in sorted(job.live.keys() - set(job.doomed)):
        hung = job.state[slot] == "training" and job.mine[slot] == job.number
        if hung and slot in job.members and any(job.state.get(peer) == "ready" for peer in job.members):
            job.state[slot] = "ready"
            job.say(slot, "failed", generation=job.mine[slot], reason="reset")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"min_replicas": 0}, "min_replicas=0"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"grace": -1.0}, "grace=-1.0"),
        ({"start_method": "thread"}, "start_method='thread'"),
    ],
)
def test_policy_refuses_what_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


# Replicas of several ranks.


def test_the_mate_of_a_dead_rank_is_started_again_once_the_others_are_past_its_step() -> None:
    job = Job(4, shard_size=2, min_replicas=2)
    job.train()
    job.kill(1)
    assert (job.members, job.generations[-1]["orphans"], job.generations[-1]["hold"]) == ([2, 3], [0], True)
    job.connect()
    assert not job.doomed
    job.say(2, "progress", step=2)
    assert job.doomed == [0]
    job.bury_doomed()
    assert job.spawned[-2:] == [(1, 1), (0, 1)]
    job.begin(0, 1)
    assert [job.last(slot, "enter")["shard"] for slot in (0, 1)] == [0, 1]
    job.say(0, "join", call=0)
    assert not job.has(2, "join_wanted", value=True), "half a replica can't be let in"
    job.say(1, "join", call=0)
    for member in job.members:
        job.say(member, "at_top", generation=job.number)
    assert (job.generations[-1]["replicas"], job.reason) == ([[2, 3], [0, 1]], "join")


def test_the_mate_of_a_dead_rank_is_started_again_if_the_others_wait_for_it_at_a_step_boundary() -> None:
    job = Job(4, shard_size=2, min_replicas=2)
    job.train()
    job.kill(1)
    job.connect()
    for member in job.members:
        job.say(member, "at_top", generation=job.number)
    assert job.doomed == [0]


def test_orphans_that_hold_every_shard_become_a_replica_at_once() -> None:
    job = Job(6, shard_size=2)
    job.train()
    job.kill(0)
    job.kill(3)
    assert (job.generations[-1]["replicas"], job.reason) == ([[4, 5], [2, 1]], "death")


def test_orphans_of_which_none_holds_some_shard_begin_the_call_again_if_they_are_all_that_is_left() -> None:
    job = Job(4, shard_size=2, max_restarts=0)
    job.train()
    job.say(0, "progress", step=7)
    job.kill(0)
    job.kill(2)
    assert job.doomed == [1, 3]
    job.bury_doomed()
    assert job.notices[-1] == "No rank is left that holds the state after step 7: all begin again."
    job.begin(1, 3)
    assert job.has(1, "enter", call=0, mode="again", step=7)
    assert (job.generations[-1]["replicas"], job.reason) == ([[1, 3]], "start")


def test_an_orphan_is_no_loss_once_the_others_have_stopped_as_they_were_asked_to() -> None:
    job = Job(4, shard_size=2)
    job.train()
    job.kill(1)
    job.connect()
    job.membership.signalled(signal.SIGTERM, job.now)
    for slot in (3, 2):
        job.raises(slot, "SIGTERMException", code=143)
    assert job.doomed == [0]
    job.bury_doomed()
    assert job.finish == Finish(143, None)


def test_ranks_that_come_back_hold_the_shards_that_are_missing_whatever_their_slots() -> None:
    job = Job(6, shard_size=2, max_restarts=0)
    job.train()
    job.kill(0)
    job.say(4, "progress", step=2)
    job.kill(2)
    job.connect()
    job.say(4, "progress", step=3)
    job.bury_doomed()
    job.begin(1, 3)
    assert sorted(job.last(slot, "enter")["shard"] for slot in (1, 3)) == [0, 1]


def test_where_ranks_share_batches_slots_have_places_and_only_whole_replicas_come_back() -> None:
    job = Job(6, shard_size=2, tensor_parallel_size=2)
    job.train()
    job.kill(0)
    job.kill(3)
    assert job.generations[-1]["replicas"] == [[4, 5]], "1 and 2 hold every shard, but were in the middle of two batches"
    job.connect()
    job.say(4, "progress", step=2)
    assert job.doomed == [1, 2]
    job.bury_doomed()
    job.begin(1, 2, 3)
    assert [job.last(slot, "enter")["shard"] for slot in (1, 2, 3)] == [1, 0, 1]
    for slot in (1, 2):
        job.say(slot, "join", call=0)
    assert not job.has(4, "join_wanted", value=True)
    job.say(3, "join", call=0)
    for member in job.members:
        job.say(member, "at_top", generation=job.number)
    assert (job.generations[-1]["replicas"], job.reason) == ([[4, 5], [2, 3]], "join")


def test_where_ranks_share_batches_the_call_begins_again_if_no_replica_is_whole() -> None:
    job = Job(4, shard_size=2, tensor_parallel_size=2)
    job.train()
    job.kill(0)
    job.kill(2)
    assert job.doomed == [1, 3]
    job.bury_doomed()
    job.begin(3, 2, 1, 0)
    assert (job.generations[-1]["replicas"], job.reason) == ([[0, 1], [2, 3]], "start")

    job = Job(4, shard_size=2, tensor_parallel_size=2, max_restarts=0)
    job.train()
    job.kill(0, 2)
    job.bury_doomed()
    job.begin(1, 3)
    job.bury_doomed()
    assert job.finish == Finish(1, "Not enough ranks: of each 2 that are a replica together, some stay out.")


def test_all_that_is_alive_is_the_replica_if_the_shards_are_as_many_as_that() -> None:
    job = Job(3, shard_size="all")
    job.train()
    job.kill(0)
    assert job.generations[-1]["replicas"] == [[1, 2]]
    job.connect()
    job.rejoin(0)
    assert (job.generations[-1]["replicas"], job.reason) == ([[1, 2, 0]], "join")


def test_a_call_that_nobody_survived_is_begun_again_by_all_past_the_calls_before_it() -> None:
    job = Job(3, shard_size="all", max_restarts=1)
    job.train()
    job.end(0, 1, 2)
    job.begin(0, 1, 2, call=1)
    job.connect()
    job.say(0, "progress", step=9)
    job.kill(0)
    job.begin(0)
    assert job.has(0, "enter", call=0, mode="skip")
    job.begin(0, call=1)  # to join, when there is nobody any more
    job.kill(1, 2)
    assert job.doomed == [0]
    job.bury_doomed()
    assert sorted(job.spawned[-3:]) == [(0, 2), (1, 1), (2, 1)]
    job.kill(2)
    assert job.notices[-1].endswith("died (SIGKILL); it stays out after 1 respawn.")
    for slot in (0, 1):
        job.begin(slot)
        assert job.has(slot, "enter", call=0, mode="skip")
        job.begin(slot, call=1)
        assert job.has(slot, "enter", call=1, mode="again", step=9) == (slot == 1)
    assert job.members == [0, 1]


@pytest.mark.parametrize(("fn", "shard_size"), [("test", "all"), ("fit", 1)])
def test_a_call_is_not_begun_again_if_its_last_rank_raised(fn: str, shard_size: Any) -> None:
    job = Job(2, shard_size=shard_size)
    job.train()
    job.end(0, 1)
    job.begin(0, 1, call=1, fn=fn)
    job.kill(0, 1)
    job.bury_doomed()
    assert job.finish is None
    job.begin(0, 1)
    job.begin(0, 1, call=1, fn=fn)
    job.say(0, "progress", step=1)
    job.kill(1)
    job.raises(0)
    job.bury_doomed()
    assert job.finish is not None


# What a user asks for.


def ask(job: Job, command: str, slot: object, kind: object = None) -> str | None:
    refusal = job.membership.asked_for(Request(command, slot, kind))
    job.settle()
    return refusal


def test_a_suspended_slot_stays_out_until_it_is_resumed_and_that_is_no_restart() -> None:
    job = Job(3, max_restarts=0)
    job.train()
    assert ask(job, "suspend", 1) is None
    assert (job.members, job.doomed) == ([0, 2], [1])
    job.connect()
    job.bury_doomed()
    job.now += 1000
    job.settle()
    assert job.spawned == [(0, 0), (1, 0), (2, 0)]
    assert [row["state"] for row in job.membership.status()["slots"]] == ["member", "suspended", "member"]
    assert ask(job, "resume", 1) is None
    assert job.spawned[-1] == (1, 1)
    job.rejoin(1)
    assert job.members == [0, 2, 1]


def test_a_suspended_slot_is_waited_for_where_too_few_replicas_are_left() -> None:
    job = Job(2, min_replicas=2, rejoin_timeout=100.0)
    job.train()
    assert ask(job, "suspend", 1) is None
    job.connect()
    job.bury_doomed()
    assert job.finish is None
    assert ask(job, "resume", 1) is None
    job.rejoin(1)
    assert job.members == [0, 1]


def test_a_slot_that_is_resumed_before_its_process_is_gone_starts_when_it_is() -> None:
    job = Job(2)
    job.train()
    assert ask(job, "suspend", 0) is None
    assert ask(job, "resume", 0) is None
    job.bury_doomed()
    job.now += 1
    job.settle()
    assert job.spawned[-1] == (0, 1)


def test_a_slot_that_is_resumed_as_a_call_ends_is_started_once() -> None:
    job = Job(3)
    job.train()
    job.end(0)
    assert ask(job, "suspend", 1) is None
    job.bury_doomed()
    assert ask(job, "resume", 1) is None
    job.end(2)
    job.begin(0, 2, call=1)
    assert job.spawned[3:] == [(1, 1)]


def test_an_excluded_slot_starts_again_and_a_fault_is_a_signal() -> None:
    job = Job(3)
    job.train()
    assert ask(job, "exclude", 2) is None
    assert job.members == [0, 1]
    job.bury_doomed()
    assert job.spawned[-1] == (2, 1)
    assert ask(job, "fault", 1, "stop") is None
    assert job.signals[-1] == (1, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("command", "slot", "kind", "why"),
    [
        ("suspend", 2, None, "there is no slot 2; expected one of 0 to 1"),
        ("suspend", "0", None, "there is no slot 0"),
        ("resume", 0, None, "slot 0 is not suspended"),
        ("fault", 0, "flood", "`flood` is no fault; expected one of kill, stop, abort, segfault"),
        ("reboot", 0, None, "`reboot` is no command"),
        ("exclude", 1, None, "slot 1 has no process now"),
        ("suspend", 0, None, "without slot 0 nobody would be left who holds the state"),
        ("fault", 0, "kill", "without slot 0 nobody would be left who holds the state"),
    ],
)
def test_what_cannot_be_done_is_refused(command: str, slot: object, kind: object, why: str) -> None:
    job = Job(2, max_restarts=0)
    job.train()
    job.kill(1)
    job.connect()
    assert why in (ask(job, command, slot, kind) or "")
    assert job.members == [0]
    job.membership.signalled(signal.SIGTERM, job.now)
    assert ask(job, command, slot, kind) == "the job is ending"
