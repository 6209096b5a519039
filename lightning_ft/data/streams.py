"""The loader of a rank that iterates a stream of its own, beside others whose streams may be longer or shorter."""

import copy
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from lightning_ft.data.random_state import random_state
from lightning_ft.data.source_positions import Beginning
from lightning_ft.data.stream_plan import StreamPlan
from lightning_ft.data.stream_reader import Stream, StreamReader

_OFFER = struct.Struct("=???")


class Exchange(Protocol):
    """How a loader learns what the others have."""

    def __call__(self, mine: bytes) -> dict[int, bytes]:
        """Collective. Return what each live slot says."""


@dataclass(frozen=True)
class _Offer:
    """What a rank can do in the step that begins.

    Args:
        has_batch: It has a batch.
        has_more: It has one for the step after, too.
        can_run: It has a batch to run the step with, be it one that does not count.

    """

    has_batch: bool
    has_more: bool
    can_run: bool


class Loan(Protocol):
    """How a rank whose stream is empty gets a batch to keep the others company with."""

    def __call__(self, batch: Any, lender: int) -> Any:
        """Collective. Return the batch of slot ``lender``, or None if it died."""


class StreamLoader:
    """The training loader of one slot whose data is a stream of its own, as under ``ddp``.

    Before each batch the ranks tell each other whether they have one. The epoch goes on until the streams of all live
    slots are used up; a rank without a batch takes part with weight 0, so that every batch is trained exactly once. A
    slot's next incarnation skips what was trained of its stream, which therefore must yield the same again; a source with
    ``state_dict`` and ``load_state_dict`` is put there instead.

    A stream that nobody reads is given to the first slot that is through with its own, which reads it as its own rank
    would: one of a job on more ranks, whose epoch goes on here, and with ``takes_over`` that of a rank that is away.

    Args:
        source: Any iterable; of its attributes, those that this class lacks are readable here too.
        slot: The slot whose loader this is.
        num_slots: Slots that have a stream.
        current_epoch: Returns the epoch that an iteration begins.
        exchange: Tells the others what this rank has.
        lengths: The lengths of the streams, by slot; None if any of them is not known.
        limit: ``Trainer(limit_train_batches=...)``: batches of a rank, or a fraction of them.
        find: Returns the stream of one rank of a number of ranks; by default, all are ``source``.
        borrow: Sends a batch to ranks that have none in the epoch.
        takes_over: Whether others read what a rank that is away has left.

    """

    keeps_position = True

    def __init__(
        self,
        source: Iterable[Any],
        slot: int,
        num_slots: int,
        current_epoch: Callable[[], int],
        exchange: Exchange,
        lengths: list[int] | None,
        limit: int | float = 1.0,
        *,
        find: Callable[[int, int], Stream] | None = None,
        borrow: Loan,
        takes_over: bool = False,
    ) -> None:
        self.source = source
        self.plan = StreamPlan(num_slots)
        self.ticket: int | None = None
        self.has_own_batch = True
        self.deferred = False
        """True in a rank that is not a member yet: its position comes with the state that it receives."""
        self.on_take: Callable[[], None] = lambda: None
        self.on_hand_over: Callable[[dict[int, int]], None] = lambda streams: None
        """Called, alike on all ranks, when slots read the streams of others from now on."""
        self._slot = slot
        self._num_slots = num_slots
        self._current_epoch = current_epoch
        self._exchange = exchange
        self._borrow = borrow
        self._find = find or (lambda number, count: Stream(source))
        self._takes_over = takes_over
        self._length = None if lengths is None else max(lengths)
        self._limits = _Limits.of(lengths, limit, num_slots)
        self._epoch_limits = self._limits
        self._resumed = False
        self._has_begun = False
        self._mine = _Offer(False, False, False)
        self._offers: dict[int, _Offer] | None = None
        self._reader: StreamReader | None = None
        self._spare: tuple[Any] | None = None
        self._opened_under: dict[str, Any] | None = None
        self._known: dict[int, dict[str, Any]] = {}
        self._beginnings: defaultdict[int, Beginning] = defaultdict(Beginning)
        self._more: dict[int, bool] = {}
        self._may_go_on = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"`{type(self.source).__name__}` has no length on every rank.")
        return self._length

    def __iter__(self) -> "StreamLoader":
        if self._has_begun and self._offers is None and self.plan.epoch == self._current_epoch():
            return self  # asked again before the first batch
        self._offers = None
        if self._resumed:
            self._resumed = False
        else:
            self._opened_under, self._known = None, {}
            self._epoch_limits = self._limits
            self.plan.begin_epoch(self._current_epoch())
        self._close()
        self._has_begun = not self.deferred
        if not self.deferred:
            self._open()
        return self

    def begin_batch(self) -> None:
        """Collective. At a batch boundary: learn who has a batch for the step that begins."""
        if self.plan.epoch != self._current_epoch():  # resumed, but that epoch was over
            iter(self)
        while True:
            self._mine = self._offer()
            rows = self._exchange(_OFFER.pack(*astuple(self._mine)))
            self._offers = {slot: _Offer(*_OFFER.unpack(row)) for slot, row in rows.items()}
            if self._hand_over():
                continue
            able = [slot for slot, offer in sorted(self._offers.items()) if offer.can_run]
            if not able or len(able) == len(self._offers) or not any(o.has_batch for o in self._offers.values()):
                break
            self._lend(able[0])
        self._may_go_on = True

    def __next__(self) -> Any:
        if self._offers is None:  # Lightning looks ahead; but somebody may join before the first batch
            raise StopIteration
        if not self._offers:  # a second batch within one step
            self.begin_batch()
        offers, self._offers = self._offers, {}
        self._check(offers)
        self._more = {slot: offer.has_more for slot, offer in offers.items()}
        self._may_go_on = any(self._more.values()) or self._has_unread(offers)
        self.ticket = self.plan.take([slot for slot, offer in offers.items() if offer.has_batch]).get(self._slot)
        batch = self._take(self._mine)
        self.has_own_batch = batch is not None
        self.on_take()
        return batch if batch is not None or self._spare is None else self._spare[0]

    @property
    def remaining_steps(self) -> int:
        """Whether this epoch has further batches, as far as is known: 1 or 0."""
        return int(self._may_go_on)

    @property
    def expected_steps(self) -> int | None:
        """How many steps the epoch has without faults, as far as that is known beforehand; 0: Lightning's idea is wrong."""
        if self._length is not None and not self._epoch_limits.are_known:
            return 0
        return max((cap for cap in self._epoch_limits.caps if cap is not None), default=None)

    @property
    def is_at_step_boundary(self) -> bool:
        """Whether all batches taken are committed."""
        return not self.plan.in_flight

    def commit(self, contributors: tuple[int, ...]) -> dict[int, list[int]]:
        """Record that a step with the gradients of ``contributors`` is committed; return the tickets that are done."""
        done = self.plan.commit(contributors, [slot for slot in contributors if not self._more.get(slot, True)])
        self._may_go_on = any(self._more.get(slot, True) for slot in contributors) or self._has_unread(contributors)
        if self._reader is not None and done.get(self._slot):
            self._reader.keep(self.plan.epoch, self.plan.position(self._reader.number))
        return done

    def left_by(self, missing: Collection[int]) -> dict[int, int | None]:
        """Return how many batches are left of each stream that ``missing`` slots read; None where that is not known."""
        present = set(range(self._num_slots)) - set(missing)
        streams = self.plan.without_reader(present, of_absent=True)
        if not self._epoch_limits.are_known:
            return dict.fromkeys(streams)
        left = {stream: int(self.plan.num_left(stream, self._epoch_limits.caps[stream])) for stream in streams}
        return {stream: count for stream, count in left.items() if count}

    def expect_more(self) -> None:
        """Somebody is about to join who may have batches, even if nobody else has."""
        self._may_go_on = True

    def state_dict(self) -> dict[str, Any]:
        """The position of all streams, the same on every rank."""
        return {"plan": self.plan.state_dict(), "opened_under": self._opened_under, "caps": self._epoch_limits.caps}

    def source_state(self) -> dict[str, Any] | None:
        """Return where the source of this rank's stream is, if it tells; to be put into ``state["sources"]``, by stream."""
        state = None if self._reader is None else self._reader.state()
        return None if self._reader is None or state is None else {"stream": self._reader.number, **state}

    def source_states(self) -> dict[int, dict[str, Any]]:
        """Return where the sources of all streams are, as far as this rank knows, by stream; at a step boundary."""
        own = self.source_state()
        known = self._known if own is None else {**self._known, own["stream"]: own}
        return {stream: state for stream, state in known.items() if state["position"] == self.plan.position(stream)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another loader was; batches that were not committed are read again.

        Args:
            state: What :meth:`state_dict` returned. ``"split"`` in it: the loader may have been one of another number of
                slots, whose streams are dealt to these for the rest of the epoch. ``"sources"``: where they were.

        Raises:
            ValueError: If it was one of another kind, or of another number of slots.

        """
        if "opened_under" not in state:
            raise ValueError(
                "The checkpoint has the position of a map-style dataset that all ranks read, but the training data is a"
                " stream of each rank. Resume with the data that it was made with, or from the end of an epoch."
            )
        num_streams = len(state["plan"]["done"])
        if num_streams != self._num_slots and not state.get("split"):
            raise ValueError(
                f"The checkpoint has the positions of {num_streams} streams, but there are {self._num_slots} ranks now. In"
                " the middle of an epoch, resume on the same number of ranks, or with"
                ' `LoaderPosition(on_world_size_change="split")`.'
            )
        self._load(state)
        self.plan.deal()
        self._resumed = True

    def load_trained(self, epoch: int, num_slots: int, num_batches: int) -> None:
        """Continue behind the first ``num_batches`` of each of ``num_slots`` streams, which yield the same again."""
        plan = StreamPlan(num_slots)
        done = [num_batches if cap is None else min(num_batches, cap) for cap in self._limits.caps]
        self.load_state_dict({"plan": plan.state_dict() | {"epoch": epoch, "done": done}, "opened_under": None})

    def load_handed_out(self, state: dict[str, Any], live: tuple[int, ...]) -> None:
        """Take the position that a live peer handed out, with the iteration under way."""
        self._load(state)
        self._resumed, self.deferred, self._may_go_on = False, False, True

    def _load(self, state: dict[str, Any]) -> None:
        self.plan.load_state_dict(state["plan"])
        self._opened_under, self._known = state["opened_under"], state.get("sources", {})
        self._epoch_limits = self._limits
        if self.plan.num_streams != self._num_slots:
            self._epoch_limits = _Limits(state.get("caps") or [None] * self.plan.num_streams, are_known=False)
        self._close()
        self._may_go_on = bool(self.left_by(range(self._num_slots)))

    # The stream.

    def close(self) -> None:
        """End the workers, unless the user's loader keeps them: no batch will be taken any more. May be called twice."""
        self._close()

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        self._has_begun = False
        if reader is not None:
            reader.close()

    def _open(self) -> None:
        """Begin what this slot reads, if there is anything, after what was trained of it."""
        number = self.plan.stream_of(self._slot)
        state, self._opened_under = self._opened_under, self._opened_under or random_state()
        if number is None:
            return
        self._reader = reader = StreamReader(self._find(number, self.plan.num_streams), number, self._beginnings[number])
        position, known = self.plan.position(number), self._known.get(number)
        reader.open(self.plan.epoch, position, state, known, read=self._epoch_limits.caps[number] != 0)
        if reader.last_skipped is not None:
            self._spare = (reader.last_skipped,)

    def _offer(self) -> _Offer:
        if self._reader is None:
            self._open()
        reader = self._reader
        if reader is None:
            return _Offer(False, False, self._spare is not None)
        left = self.plan.num_left(reader.number, self._epoch_limits.caps[reader.number])
        # Without a length, only reading on tells whether a batch is the last one.
        is_sized = self._epoch_limits.are_known
        while len(reader.ahead) < min(left, 1 if is_sized else 2) and reader.read():
            pass
        if not left:
            reader.ahead.clear()
        has_batch = bool(reader.ahead)
        if has_batch and reader.ahead[0] is None and self._spare is None:
            while reader.ahead[-1] is None and reader.read():
                pass
            if reader.ahead[-1] is not None:
                self._spare = (_copy(reader.ahead[-1]),)
        has_more = left > 1 and (not reader.used_up if is_sized else len(reader.ahead) > 1)
        can_run = self._spare is not None or (has_batch and reader.ahead[0] is not None)
        return _Offer(has_batch, has_more, can_run)

    def _hand_over(self) -> bool:
        """Give slots that are through streams that nobody reads; return whether there were any."""
        assert self._offers is not None
        idle = [slot for slot, offer in self._offers.items() if not offer.has_batch]
        found = self.plan.hand_over(idle, self._offers.keys(), of_absent=self._takes_over) if idle else {}
        if self._slot in found:
            self._close()
        if found:
            self.on_hand_over(found)
        return bool(found)

    def _has_unread(self, live: Collection[int]) -> bool:
        return bool(self.plan.without_reader(live, of_absent=self._takes_over))

    def _take(self, mine: _Offer) -> Any:
        if not mine.has_batch:
            return None
        assert self._reader is not None
        batch = self._reader.ahead.popleft()
        if batch is not None and not mine.has_more:
            # While others go on, this rank runs a batch that does not count: not one that the user's code has changed.
            self._spare = (_copy(batch),)
        elif batch is not None and self._spare is None:
            self._spare = (batch,)  # should the stream be shorter than it says
        return batch

    def _lend(self, lender: int) -> None:
        """Collective. Let ranks that have no batch to run a step with run one of the ``lender``'s, which will not count."""
        mine = None
        if lender == self._slot and self._spare is not None:
            mine = self._spare[0]
        elif lender == self._slot:
            assert self._reader is not None
            mine = self._reader.ahead[0]
        batch = self._borrow(mine, lender)
        if not self._mine.can_run and batch is not None:
            self._spare = (batch,)

    def _check(self, offers: dict[int, _Offer]) -> None:
        """End the epoch if nobody can train."""
        is_stuck = not all(offer.can_run for offer in offers.values())
        if not any(offer.has_batch for offer in offers.values()) and (is_stuck or self.plan.is_untouched):
            raise StopIteration


@dataclass(frozen=True)
class _Limits:
    """How many batches there are of each stream.

    Args:
        caps: At most; None where that is not known.
        are_known: Whether there are as many, unless a stream is shorter than it says.

    """

    caps: list[int | None]
    are_known: bool

    @classmethod
    def of(cls, lengths: list[int] | None, limit: int | float, num_slots: int) -> "_Limits":
        if lengths is None:
            return cls([limit if isinstance(limit, int) else None] * num_slots, are_known=False)
        of_each = [min(length, limit) if isinstance(limit, int) else int(length * limit) for length in lengths]
        return cls([*of_each], are_known=True)


def _copy(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever a batch is made of: at worst, the user's code finds it as it left it
        return batch
