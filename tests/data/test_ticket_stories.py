"""Whatever happens to a plan, it does what one does whose tickets are written out."""

import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ft.data.tickets import TicketPlan
from tests.data.written_out_plan import WrittenOutPlan


class Story:
    """A plan and what it must be equal to; what happens, happens to both.

    What is looked at is looked at in a copy: a plan that puts off work until it is asked must not be asked all the time.
    """

    def __init__(self, num_tickets: int, num_slots: int) -> None:
        self.plan = TicketPlan(num_tickets, num_slots)
        self.expected = WrittenOutPlan(num_tickets, num_slots)
        self.live = list(range(num_slots))
        self.done: list[int] = []
        self.last: dict[int, list[int]] = {}
        self.told: list[tuple[Any, Any]] = []

    def copy(self) -> "Story":
        return pickle.loads(pickle.dumps(self))

    def take(self) -> bool:
        """Return whether there was something to take."""
        return bool(self._both("take", tuple(self.live)))

    def commit(self, contributors: Collection[int]) -> None:
        self.last = dict(self._both("commit", tuple(contributors)))
        self.done += chain.from_iterable(self.last.values())

    def die(self, slots: Collection[int], told: bool) -> None:
        """Slots die, but not all; if it is not told, the next take or commit has to notice."""
        survivors = [slot for slot in self.live if slot not in slots]
        self.live = survivors or self.live
        if told and survivors:
            for slot in sorted(slots):
                self._both("remove", slot)

    def join(self, slots: Collection[int]) -> None:
        """Slots join, also such as are live: a respawn may be faster than the news of the death."""
        for slot in sorted(slots):
            self._both("add", slot)
        self.live = sorted({*self.live, *slots})

    def forget(self, slot: int) -> None:
        """What was committed last is averaged anew, without a slot."""
        tickets = self.last.pop(slot, [])
        self._both("reopen", tickets)
        self.done = [ticket for ticket in self.done if ticket not in tickets]

    def resume(self) -> None:
        """A plan made elsewhere goes on from the state of this one: that of a joiner."""
        state = json.loads(json.dumps(self.plan.state_dict()))
        self.plan = TicketPlan(self.plan.num_tickets, self.expected.num_slots)
        self.plan.load_state_dict(state)

    def resume_on(self, num_slots: int) -> None:
        """The job is stopped within a step and goes on with as many slots."""
        self.expected.num_slots = num_slots
        self.resume()
        for slot in list(self.expected.in_flight):
            self._both("remove", slot)
        self.live = list(range(num_slots))

    def begin_epoch(self) -> None:
        self._both("begin_epoch", self.plan.epoch + 1)
        self.done, self.last = [], {}

    def step(self, num: int = 1) -> None:
        """Steps without faults, of one batch each."""
        for _ in range(num):
            self.take()
            self.commit(self.live)

    def finish(self, window: int) -> None:
        """The rest of the epoch, without faults, takes as many batches as it was said to."""
        promised = self.expected.remaining_steps(self.live)
        for number in range(promised):
            assert self.plan.remaining_steps(self.live) == promised - number
            assert self.take()
            if number % window == 0:
                self.commit(self.live)
        assert not self.take()
        self.commit(self.live)
        assert sorted(self.done) == list(range(self.expected.num_tickets))

    def check(self) -> None:
        expected, copy = self.expected, pickle.loads(pickle.dumps(self.plan))
        assert copy.remaining_steps(tuple(self.live)) == expected.remaining_steps(self.live)  # before it is asked the rest
        assert copy.num_open == len(expected.open_tickets())
        assert (copy.round, copy.in_flight) == (expected.round, expected.in_flight)
        for slot in range(expected.num_slots + 2):
            assert list(copy.upcoming(slot)) == expected.upcoming(slot)
        assert list(copy.open_tickets()) == expected.open_tickets()
        everything = [*self.done, *copy.open_tickets(), *chain.from_iterable(copy.in_flight.values())]
        assert sorted(everything) == list(range(expected.num_tickets))
        restored = TicketPlan(expected.num_tickets, expected.num_slots)
        restored.load_state_dict(json.loads(json.dumps(copy.state_dict())))
        assert restored.state_dict() == copy.state_dict()

    def check_told(self) -> None:
        """What a plan returned stays what it was."""
        for told, expected in self.told:
            assert as_dict(told) == expected

    def _both(self, name: str, argument: Any) -> Any:
        told = getattr(self.plan, name)(argument)
        expected = getattr(self.expected, name)(argument)
        if expected is not None:
            assert as_dict(pickle.loads(pickle.dumps(told))) == expected
            self.told.append((told, expected))
        return expected


def as_dict(told: Mapping[int, Any]) -> dict[int, Any]:
    assert list(told) == list(told.keys())
    assert all(told.get(slot) == told[slot] for slot in told)
    return dict(told)


KINDS = ["take"] * 3 + ["commit"] * 2 + ["step"] * 2 + ["die"] * 2 + ["join"] * 2
KINDS += ["swap", "lack", "forget", "resume", "resume_on", "begin_epoch"]
EVENTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5), st.booleans())


def tell(story: Story, event: tuple[str, int, int, bool]) -> None:
    """Have happen what is named, to slots that are chosen by the numbers."""
    kind, first, second, told = event
    live, num_known = story.live, story.expected.num_slots + 2  # two more than the first round knows
    one, other = live[first % len(live)], live[second % len(live)]
    happenings: dict[str, Callable[[], object]] = {
        "take": story.take,
        "commit": lambda: story.commit(live),
        "step": lambda: story.step(first + 1),
        "die": lambda: story.die({one, other}, told),
        "join": lambda: story.join({first % num_known, second % num_known}),
        "swap": lambda: (story.die({one}, told), story.join({second % num_known})),
        "lack": lambda: story.commit([slot for slot in live if slot != one]),
        "forget": lambda: (story.forget(one), told and story.die({one}, True)),
        "resume": story.resume,
        "resume_on": lambda: story.resume_on(first + 1),
        "begin_epoch": story.begin_epoch,
    }
    happenings[kind]()


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tickets, slots, and steps without faults at first: as likely as not few are left, and as many for each slot."""
    num_slots, num_rows = draw(st.integers(1, 5)), draw(st.integers(0, 8))
    return num_rows * num_slots + draw(st.sampled_from([0, 0, 1, 3])), num_slots, draw(st.integers(0, num_rows))


@given(sizes(), st.lists(EVENTS, max_size=40), st.integers(1, 3))
@settings(max_examples=150)
def test_whatever_happens_every_ticket_is_trained_once_and_in_the_order_that_was_promised(
    size: tuple[int, int, int], happens: list[tuple[str, int, int, bool]], window: int
) -> None:
    num_tickets, num_slots, num_steps = size
    story = Story(num_tickets, num_slots)
    story.step(num_steps)
    for event in happens:
        tell(story, event)
        story.check()
    story.finish(window)
    story.check()
    story.check_told()


def events_of(story: Story) -> Iterator[tuple[Any, ...]]:
    """Everything that can happen next."""
    live, num_slots = story.live, story.expected.num_slots
    yield ("take",)
    yield ("commit", live)
    yield ("resume",)
    for slot in range(num_slots + 1):
        yield ("join", [slot])
    if len(live) > 1:
        for slot in live:
            yield ("commit", [other for other in live if other != slot])
            yield ("die", [slot], True)
            yield ("die", [slot], False)
    for slot, tickets in story.last.items():
        if tickets:
            yield ("forget", slot)


@pytest.mark.parametrize(("num_tickets", "num_slots", "length"), [(4, 2, 5), (5, 3, 3)])
def test_everything_that_can_happen_within_a_few_events(num_tickets: int, num_slots: int, length: int) -> None:
    start = Story(num_tickets, num_slots)
    stories = [start]
    for _ in range(num_tickets // num_slots):  # what happens may begin after any number of steps without faults
        start = start.copy()
        start.step()
        stories.append(start)
    seen: set[bytes] = set()
    for _ in range(length):
        following = []
        for before in stories:
            image = pickle.dumps(before)
            for event in events_of(before):
                story: Story = pickle.loads(image)
                getattr(story, event[0])(*event[1:])
                story.check_told()
                story.told = story.told[-1:]
                key = pickle.dumps((story.plan, story.expected, story.live, sorted(story.last)))
                if key not in seen:
                    seen.add(key)
                    story.check()
                    following.append(story)
        stories = following
    assert seen
