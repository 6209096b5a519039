"""The loader of a rank that iterates a stream of its own, beside others whose streams may be longer or shorter."""

import copy
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.random_state import random_state, under_random_state
from lightning_ft.data.source_positions import Memory, SourcePositions
from lightning_ft.data.stream_plan import StreamPlan

_OFFER = struct.Struct("=???")
_END = object()


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

    Args:
        source: Any iterable; of its attributes, those that this class lacks are readable here too.
        slot: The slot whose loader this is.
        num_slots: Slots that have a stream.
        current_epoch: Returns the epoch that an iteration begins.
        exchange: Tells the others what this rank has.
        lengths: The lengths of the streams, by slot; None if any of them is not known.
        limit: ``Trainer(limit_train_batches=...)``: batches of a rank, or a fraction of them.
        in_stream: Entered while the source runs.
        borrow: Sends a batch to ranks that have none in the epoch.
        memory: Keeps the state of a source that has one.

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
        in_stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        borrow: Loan,
        memory: Memory | None = None,
    ) -> None:
        self.source = source
        self.plan = StreamPlan(num_slots)
        self.ticket: int | None = None
        self.has_own_batch = True
        self.deferred = False
        """True in a rank that is not a member yet: its position comes with the state that it receives."""
        self.on_take: Callable[[], None] = lambda: None
        self._slot = slot
        self._current_epoch = current_epoch
        self._exchange = exchange
        self._borrow = borrow
        self._positions = None if memory is None else SourcePositions.of(source, memory)
        self._in_stream = in_stream
        self._length = None if lengths is None else max(lengths)
        self._is_sized = lengths is not None
        caps = (
            [limit if isinstance(limit, int) else None] * num_slots
            if lengths is None
            else [_limited(n, limit) for n in lengths]
        )
        self._caps = caps
        self._cap = caps[slot]
        self.expected_steps = max((cap for cap in caps if cap is not None), default=None)
        """How many steps the epoch has without faults, as far as that is known beforehand."""
        self._resumed = False
        self._mine = _Offer(False, False, False)
        self._offers: dict[int, _Offer] | None = None
        self._stream: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        self._used_up = False
        self._spare: tuple[Any] | None = None
        self._opened_under: dict[str, Any] | None = None
        self._more: dict[int, bool] = {}
        self._through: set[int] = set()
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
        if self._stream is not None and self._offers is None and self.plan.epoch == self._current_epoch():
            return self  # asked again before the first batch
        self._offers = None
        if self._resumed:
            self._resumed = False
        else:
            self._opened_under = None
            self._through.clear()
            self.plan.begin_epoch(self._current_epoch())
        self._close()
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
        self._through |= {slot for slot, offer in offers.items() if not offer.has_batch}
        self._may_go_on = any(self._more.values())
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
    def is_at_step_boundary(self) -> bool:
        """Whether all batches taken are committed."""
        return not self.plan.in_flight

    def commit(self, contributors: tuple[int, ...]) -> dict[int, list[int]]:
        """Record that a step with the gradients of ``contributors`` is committed; return the tickets that are done."""
        self._may_go_on = any(self._more.get(slot, True) for slot in contributors)
        self._through |= {slot for slot in contributors if not self._more.get(slot, True)}
        done = self.plan.commit(contributors)
        if self._positions is not None and done.get(self._slot):
            self._positions.keep(self.plan.epoch, self.plan.position(self._slot))
        return done

    def left_of(self, missing: Iterable[int]) -> dict[int, int | None]:
        """Return how many batches the streams of ``missing`` slots have left, if any; None where that is not known."""
        left = {slot: self._caps[slot] for slot in missing if slot not in self._through}
        if self._is_sized:
            left = {slot: int(self.plan.num_left(slot, cap)) for slot, cap in left.items()}
        else:
            left = dict.fromkeys(left)
        return {slot: count for slot, count in left.items() if count != 0}

    def expect_more(self) -> None:
        """Somebody is about to join who may have batches, even if nobody else has."""
        self._may_go_on = True

    def state_dict(self) -> dict[str, Any]:
        """The position of all streams, the same on every rank."""
        return {"plan": self.plan.state_dict(), "opened_under": self._opened_under}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another loader was; batches that were not committed are read again."""
        if "opened_under" not in state:
            raise ValueError(
                "The checkpoint has the position of a map-style dataset that all ranks read, but the training data is a"
                " stream of each rank. Resume with the data that it was made with, or from the end of an epoch."
            )
        self.plan.load_state_dict(state["plan"])
        self._opened_under = state["opened_under"]
        self._close()
        self._resumed = True

    def load_handed_out(self, state: dict[str, Any], live: tuple[int, ...]) -> None:
        """Take the position that a live peer handed out, with the iteration under way."""
        self.load_state_dict(state)
        self._resumed, self.deferred = False, False

    # The stream.

    def close(self) -> None:
        """End the workers, unless the user's loader keeps them: no batch will be taken any more. May be called twice."""
        self._close()

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not getattr(self.source, "_iterator", None):
            end_workers(stream)
        self._ahead.clear()
        self._used_up = False

    def _open(self) -> None:
        """Begin the stream, after what was trained of it.

        A shuffling sampler and workers draw their seeds when the stream begins, some of them with its first batch. To read
        the same again they must draw the same, and what training draws must not shift.
        """
        state, self._opened_under = self._opened_under, self._opened_under or random_state()
        position = self.plan.position(self._slot)
        with under_random_state(state), self._in_stream():
            _set_epoch(self.source, self.plan.epoch)
            is_there = self._positions is not None and self._positions.resume(self.plan.epoch, position)
            self._stream = iter(self.source)
            if self._cap != 0:
                self._read()
            for _ in range(0 if is_there else position):
                if not self._ahead:
                    break
                trained = self._ahead.popleft()
                if trained is not None:
                    self._spare = (trained,)
                self._read()

    def _offer(self) -> _Offer:
        if self._stream is None:
            self._open()
        left = self.plan.num_left(self._slot, self._cap)
        # Without a length, only reading on tells whether a batch is the last one.
        while len(self._ahead) < min(left, 1 if self._is_sized else 2) and self._read():
            pass
        if not left:
            self._ahead.clear()
        has_batch = bool(self._ahead)
        if has_batch and self._ahead[0] is None and self._spare is None:
            while self._ahead[-1] is None and self._read():
                pass
            if self._ahead[-1] is not None:
                self._spare = (_copy(self._ahead[-1]),)
        has_more = left > 1 and (not self._used_up if self._is_sized else len(self._ahead) > 1)
        can_run = self._spare is not None or (has_batch and self._ahead[0] is not None)
        return _Offer(has_batch, has_more, can_run)

    def _read(self) -> bool:
        if self._used_up:
            return False
        assert self._stream is not None
        with self._in_stream():
            batch = next(self._stream, _END)
        self._used_up = batch is _END
        if not self._used_up:
            self._ahead.append(batch)
            if self._positions is not None:
                self._positions.advance()
        return not self._used_up

    def _take(self, mine: _Offer) -> Any:
        if not mine.has_batch:
            return None
        batch = self._ahead.popleft()
        if batch is not None and not mine.has_more:
            # While others go on, this rank runs a batch that does not count: not one that the user's code has changed.
            self._spare = (_copy(batch),)
        elif batch is not None and self._spare is None:
            self._spare = (batch,)  # should the stream be shorter than it says
        return batch

    def _lend(self, lender: int) -> None:
        """Collective. Let ranks that have no batch to run a step with run one of the ``lender``'s, which will not count."""
        mine = None
        if lender == self._slot:
            mine = self._ahead[0] if self._spare is None else self._spare[0]
        batch = self._borrow(mine, lender)
        if not self._mine.can_run and batch is not None:
            self._spare = (batch,)

    def _check(self, offers: dict[int, _Offer]) -> None:
        """End the epoch if nobody can train."""
        is_stuck = not all(offer.can_run for offer in offers.values())
        if not any(offer.has_batch for offer in offers.values()) and (is_stuck or self.plan.is_untouched):
            raise StopIteration


def _copy(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever a batch is made of: at worst, the user's code finds it as it left it
        return batch


def _limited(length: int, limit: int | float) -> int:
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _set_epoch(source: Any, epoch: int) -> None:
    sampler, batch_sampler = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
    for candidate in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        set_epoch = getattr(candidate, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
