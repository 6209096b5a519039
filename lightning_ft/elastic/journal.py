"""The results of the operations since a piece of work began, for a rank that does it again while the others wait for it."""

from typing import Any


class Journal:
    """Results in the order in which operations were completed; read again from the beginning after :meth:`rewind`."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Any]] = []
        self._position = 0

    @property
    def is_behind(self) -> bool:
        """Whether the next operation is one that was completed before."""
        return self._position < len(self._entries)

    def write(self, label: str, result: Any) -> None:
        """Note the result of the operation just completed."""
        self._entries.append((label, result))
        self._position = len(self._entries)

    def read(self) -> tuple[str, Any]:
        """Return the label and the result of the next operation."""
        entry = self._entries[self._position]
        self._position += 1
        return entry

    def rewind(self) -> None:
        """Begin again."""
        self._position = 0
