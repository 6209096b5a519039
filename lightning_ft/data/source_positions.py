"""Where a stream with a state of its own is, so that a slot's next incarnation need not read it from its start."""

import logging
import pickle
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Memory(Protocol):
    """What a slot's next incarnation finds of this one."""

    def keep(self, value: bytes) -> None:
        """Keep ``value`` in place of the one before."""

    def recall(self) -> bytes | None:
        """Return what was kept last."""


class SourcePositions:
    """Where a source with a state of its own was after each batch; kept for the slot's next incarnation.

    Args:
        source: With ``state_dict`` and ``load_state_dict``.
        memory: Where positions are kept.

    """

    def __init__(self, source: Any, memory: Memory) -> None:
        self._source = source
        self._memory: Memory | None = memory
        self._num_read = self._committed = 0
        self._states: dict[int, Any] = {}

    @classmethod
    def of(cls, source: Any, memory: Memory) -> "SourcePositions | None":
        """Return the positions of ``source``, None if it has no state."""
        is_stateful = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        return cls(source, memory) if is_stateful else None

    def resume(self, epoch: int, position: int, known: dict[str, Any] | None = None) -> int:
        """Put the source behind as many of its first ``position`` batches of ``epoch`` as it can be; return how many.

        Args:
            epoch: The epoch under way.
            position: How many batches of it were trained.
            known: What :meth:`committed` told in another job.

        """
        self._states.clear()
        self._num_read = self._committed = 0
        packed = self._memory.recall() if position and self._memory is not None else None
        kept_epoch, states = (None, {}) if packed is None else pickle.loads(packed)
        if kept_epoch != epoch or position not in states:
            if known is None or known["position"] != position:
                return 0
            states = {position: known["state"]}
        self._source.load_state_dict(states[position])
        self._num_read = self._committed = position
        self._states[position] = states[position]
        return position

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
