"""An iterator over micro-batches that gives those of the step under way again."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_ft.rerun.batches import copy_structure


class RerunDataIterator:
    """Remembers what it gave in the step under way, so that the step can be run again with the same micro-batches.

    Args:
        iterable: Where micro-batches come from. Wrapping a `RerunDataIterator` shares its memory.

    Raises:
        RuntimeError: If more micro-batches are asked for in a rerun than there were before.

    Example::

        data = RerunDataIterator(loader)
        while machine.should_run_forward_backward(data):
            loss = model(next(data))

    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        if isinstance(iterable, RerunDataIterator):
            self.__dict__ = iterable.__dict__
            return
        self._source: Iterator[Any] = iter(iterable)
        self._saved: list[Any] = []
        self._replaying = False
        self._position = 0

    def __iter__(self) -> "RerunDataIterator":
        return self

    def __next__(self) -> Any:
        if self._replaying:
            if self._position >= len(self._saved):
                raise RuntimeError(
                    f"`RerunDataIterator` was asked for micro-batch {self._position + 1} of a rerun of"
                    f" {len(self._saved)}: a rerun must read what the first run read."
                )
            batch = self._saved[self._position]
            self._position += 1
            return copy_structure(batch)
        batch = next(self._source)
        self._saved.append(copy_structure(batch))
        return batch

    def rewind(self) -> None:
        """Give the micro-batches of the step under way again."""
        self._replaying, self._position = True, 0

    def advance(self) -> None:
        """Begin the next step; forget what the last one read."""
        self._replaying, self._position = False, 0
        self._saved.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what the step under way read, and where in it a rerun stands."""
        return {"saved_microbatches": list(self._saved), "replaying": self._replaying, "replay_pos": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._saved = list(state["saved_microbatches"])
        self._replaying, self._position = state["replaying"], state["replay_pos"]
