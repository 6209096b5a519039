"""Where a stream with a state of its own is, so that a slot's next incarnation need not read it from its start."""

import logging
import pickle
from typing import Any, Protocol
from weakref import WeakSet

log = logging.getLogger(__name__)


class Memory(Protocol):
    """What a slot's next incarnation finds of this one."""

    def keep(self, value: bytes) -> None:
        """Keep ``value`` in place of the one before."""

    def recall(self) -> bytes | None:
        """Return what was kept last."""


_begun: "WeakSet[Any]" = WeakSet()


class Beginning:
    """Where a source was before the first batch of an epoch; some begin anew only once they were at their end."""

    def __init__(self) -> None:
        self._first: bytes | None = None  # the first time in this process; empty if it did not begin at its start
        self._epoch: int | None = None
        self._state: Any = None

    def note(self, epoch: int, source: Any) -> None:
        """Note the state of ``source``, which begins ``epoch`` and has yielded nothing yet."""
        is_first = _begins_first(source)
        try:
            state = source.state_dict()
        except Exception as error:  # some can only tell once they yielded something
            log.debug("%s does not tell where it begins: %r", type(source).__name__, error)
            return
        packed = _packed(state)
        if self._first is None:
            self._first = packed if is_first else b""
        # Later it may still tell where it was at the end of the epoch before: loaded, it would yield nothing.
        if state is not None and (is_first or (packed and packed == self._first)):
            self._epoch, self._state = epoch, state

    def skip(self, source: Any) -> None:
        """Take note that ``source`` goes on from elsewhere."""
        _begins_first(source)

    def put_back(self, epoch: int, source: Any) -> None:
        """Put ``source`` back to where it began ``epoch``, if that is known."""
        if self._epoch == epoch:
            source.load_state_dict(self._state)


class SourcePositions:
    """Where a source with a state of its own was after each batch; kept for the slot's next incarnation.

    Args:
        source: With ``state_dict`` and ``load_state_dict``.
        memory: Where positions are kept.
        beginning: Where it began in this process.

    """

    def __init__(self, source: Any, memory: Memory, beginning: "Beginning") -> None:
        self._source = source
        self._beginning = beginning
        self._memory: Memory | None = memory
        self._num_read = self._committed = 0
        self._states: dict[int, Any] = {}

    @classmethod
    def of(cls, source: Any, memory: Memory, beginning: "Beginning") -> "SourcePositions | None":
        """Return the positions of ``source``, None if it has no state."""
        is_stateful = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        return cls(source, memory, beginning) if is_stateful else None

    def resume(self, epoch: int, position: int, known: dict[str, Any] | None = None) -> int:
        """Put the source behind as many of its first ``position`` batches of ``epoch`` as it can be; return how many.

        Args:
            epoch: The epoch under way.
            position: How many batches of it were trained.
            known: What :meth:`committed` told, in another job or before this one goes back.

        """
        self._states.clear()
        self._num_read = self._committed = 0
        packed = self._memory.recall() if position and self._memory is not None else None
        kept_epoch, states = (None, {}) if packed is None else pickle.loads(packed)
        if kept_epoch != epoch or position not in states:
            if known is None or known["position"] != position:
                self._beginning.put_back(epoch, self._source)
                return 0
            states = {position: known["state"]}
        self._beginning.skip(self._source)
        self._source.load_state_dict(states[position])
        self._num_read = self._committed = position
        self._states[position] = states[position]
        return position

    def begin(self, epoch: int) -> None:
        """Note where the source is that begins an epoch and has yielded nothing yet; after :meth:`resume` returned 0."""
        self._beginning.note(epoch, self._source)

    def stand_at(self, position: int) -> None:
        """Take ``position`` batches for committed, up to which the source was read."""
        if position in self._states:
            self._committed = position

    def committed(self) -> dict[str, Any] | None:
        """Return where the source was after the last committed batch; None if that is its start, or not known."""
        state = self._states.get(self._committed)
        return None if state is None else {"position": self._committed, "state": state}

    def advance(self) -> None:
        """Note where the source is, one batch further."""
        self._num_read += 1
        self._states[self._num_read] = self._source.state_dict()

    def keep(self, epoch: int, position: int) -> None:
        """Keep where it was after the last committed batch, and at the commit before: of this one, others may not know."""
        kept = {number: self._states[number] for number in (self._committed, position) if number in self._states}
        self._committed = position
        self._states = {number: state for number, state in self._states.items() if number >= position}
        if self._memory is None:
            return
        try:
            self._memory.keep(pickle.dumps((epoch, kept)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            log.warning(
                "The state of %s can't be kept (%s): a rank that comes back skips.", type(self._source).__name__, error
            )
            self._memory = None


def _packed(state: Any) -> bytes:
    try:
        return pickle.dumps(state)
    except (pickle.PicklingError, TypeError, AttributeError):
        return b""


def _begins_first(source: Any) -> bool:
    """Return whether a source begins for the first time in this process, with the dataset that it reads."""
    parts = [source, source.dataset] if hasattr(source, "dataset") else [source]
    try:
        is_first = not any(part in _begun for part in parts)
        _begun.update(parts)
    except TypeError:  # it can't be remembered
        return False
    return is_first
