"""Which share of the data each slot has: one of its own, or one with those that work on the same batches."""

from collections.abc import Iterable

from lightning_ft.elastic.engine import Engine


class DataShares:
    """The shares of the data, numbered from 0, as data is dealt to data parallel ranks.

    Args:
        engine: Knows the slots, and how many of them in a row work on one batch together.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def own(self) -> int:
        """The share of this process."""
        return self._engine.slot // self._row_size

    @property
    def count(self) -> int:
        """How many there are."""
        return self._engine.num_slots // self._row_size

    def of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Return the shares of ``slots``, sorted."""
        size = self._row_size
        return tuple(sorted({slot // size for slot in slots}))

    def first_slot(self, share: int) -> int:
        """Return the first of the slots that have a share."""
        return share * self._row_size

    @property
    def _row_size(self) -> int:
        rows = self._engine.rows
        return 1 if rows is None else rows.size
