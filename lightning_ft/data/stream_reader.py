"""Reads one stream of a job from where it was."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.random_state import under_random_state
from lightning_ft.data.source_positions import Beginning, Memory, SourcePositions

_END = object()


@dataclass(frozen=True)
class Stream:
    """One of the streams of a job, as whoever reads it finds it.

    Args:
        source: What yields it.
        entered: Entered while the source runs.
        memory: Keeps the state of a source that has one.

    """

    source: Iterable[Any]
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    memory: Memory | None = None


class StreamReader:
    """Reads a stream, some batches ahead of those that are trained.

    Args:
        stream: What to read.
        number: Which one of the job's it is.
        beginning: Where its source began in this process.

    """

    def __init__(self, stream: Stream, number: int, beginning: Beginning) -> None:
        self.number = number
        self.ahead: deque[Any] = deque()
        """What was read and not taken."""
        self.used_up = False
        self.last_skipped: Any = None
        """The last batch that was read only to get behind it."""
        self._stream = stream
        self._positions = None if stream.memory is None else SourcePositions.of(stream.source, stream.memory, beginning)
        self._batches: Iterator[Any] | None = None

    def open(
        self, epoch: int, position: int, random: dict[str, Any] | None, known: dict[str, Any] | None, *, read: bool
    ) -> None:
        """Begin the stream, after what was trained of it.

        A shuffling sampler and workers draw their seeds when the stream begins, some of them with its first batch. To read
        the same again they must draw the same, and what training draws must not shift.

        Args:
            epoch: The epoch under way.
            position: How many batches of it were trained.
            random: What the stream draws from; None: from the generators, as the epoch begins.
            known: Where the source was at some position, as :meth:`state` told it.
            read: Whether to read at all.

        """
        with under_random_state(random), self._stream.entered():
            _set_epoch(self._stream.source, epoch)
            behind = 0 if self._positions is None else self._positions.resume(epoch, position, known)
            self._batches = iter(self._stream.source)
            if self._positions is not None and not behind:
                self._positions.begin(epoch)
            if read:
                self.read()
            for _ in range(position - behind):
                if not self.ahead:
                    break
                trained = self.ahead.popleft()
                if trained is not None:
                    self.last_skipped = trained
                self.read()
            if self._positions is not None:
                self._positions.stand_at(position)

    def read(self) -> bool:
        """Read a further batch; return whether there was one."""
        if self.used_up:
            return False
        assert self._batches is not None
        with self._stream.entered():
            batch = next(self._batches, _END)
        self.used_up = batch is _END
        if not self.used_up:
            self.ahead.append(batch)
            if self._positions is not None:
                self._positions.advance()
        return not self.used_up

    def keep(self, epoch: int, position: int) -> None:
        """Keep where the source was after ``position`` batches, which are all that is committed."""
        if self._positions is not None:
            self._positions.keep(epoch, position)

    def state(self) -> dict[str, Any] | None:
        """Return where the source was after the last committed batch; None if it has no state."""
        return None if self._positions is None else self._positions.committed()

    def close(self) -> None:
        """End the workers, unless the user's loader keeps them. May be called twice."""
        batches, self._batches = self._batches, None
        if batches is not getattr(self._stream.source, "_iterator", None):
            end_workers(batches)
        self.ahead.clear()


def _set_epoch(source: Any, epoch: int) -> None:
    sampler, batch_sampler = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
    for candidate in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        set_epoch = getattr(candidate, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
