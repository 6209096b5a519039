"""Snapshots of the training state in host memory, taken together by all ranks of a replica and read after some died.

Each rank has two slots of shared memory. A snapshot is whole once all ranks finished theirs; until all know that, nobody
writes to the slots of the one before. So there is a whole one at every moment after the first.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_ft.elastic.state_codec import encode
from lightning_ft.sharding.shard_tree import take_apart
from lightning_ft.sharding.shared_slots import Label, Moment, SharedSlot

log = logging.getLogger(__name__)

NUM_COPIES = 2
"""Slots of a rank: while one is written, the other one is whole."""


class Snapshots:
    """What one rank keeps, and how it is taken without stopping the training.

    Args:
        paths: Where this rank's two slots are.

    """

    def __init__(self, paths: Sequence[str]) -> None:
        assert len(paths) == NUM_COPIES
        self._slots = [SharedSlot(path) for path in paths]
        self._kept = 0  # the slot that must not be written
        self._latest: int | None = None  # the slot written last
        self._copy: _Copy | None = None
        self._told = False

    @property
    def is_latest_whole(self) -> bool:
        """Whether this rank's part of the snapshot begun last is there; a rank that began none has no objection."""
        return self._latest is None or self._slots[self._latest].label() is not None

    def keep(self, moment: Moment | None) -> None:
        """Spare the snapshot of ``moment`` from now on, which all ranks agreed to be whole."""
        self.fence()
        self._latest = None
        for number, slot in enumerate(self._slots):
            label = slot.label()
            if label is not None and label.moment == moment:
                self._kept = number

    def begin(
        self, label: Label, state: Any, *, deferred: Iterable[Tensor] = (), latest_is_whole: bool, at_once: bool = False
    ) -> None:
        """Take this rank's part of a snapshot.

        Args:
            label: Which snapshot, and which part.
            state: Nested plain data with tensors; sharded ones as they are.
            deferred: Those tensors in it that do not change before :meth:`fence`: they are copied meanwhile, others now.
            latest_is_whole: Whether all ranks said so of the snapshot before.
            at_once: Whether everything is copied now.

        """
        self.fence()
        if latest_is_whole and self._latest is not None:
            self._kept = self._latest
        self._latest = number = NUM_COPIES - 1 - self._kept
        slot = self._slots[number]
        encoded = encode(take_apart(state), on_unsupported="skip")
        try:
            places = slot.begin(label, encoded)
        except OSError as error:
            if not self._told:
                log.warning("No snapshot of step %d in memory: %s. The one before stays.", label.moment.step, error)
            self._told = True
            return
        later = () if at_once else tuple(deferred)
        late = {tensor.untyped_storage().data_ptr() for tensor in map(_local, later)}
        pairs = list(zip(places, encoded.storages, strict=True))
        for place, storage in pairs:
            if storage.untyped_storage().data_ptr() not in late:
                place.copy_(storage)
        rest = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() in late]
        self._copy = _Copy(rest, [_local(tensor) for tensor in later], slot.finish)
        if at_once:
            self.fence()

    def poll(self) -> None:
        """Take note of a copy that is over; from the thread that trains, while it changes nothing."""
        if self._copy is not None and self._copy.is_over:
            self.fence()

    def fence(self) -> None:
        """Return once nothing is being copied; before what was deferred changes."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.finish()


class _Copy:
    """Copies in a thread while the caller computes."""

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]], watched: Sequence[Tensor], on_whole: Callable[[], None]
    ) -> None:
        self._pairs = pairs
        self._watched = [(tensor, _version(tensor)) for tensor in watched]
        self._on_whole = on_whole
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lightning-ft-snapshot", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for place, storage in self._pairs:
                place.copy_(storage)
        except BaseException as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            log.warning("A snapshot in memory failed: %s. The one before stays.", self._error)
        elif all(_version(tensor) == version for tensor, version in self._watched):
            self._on_whole()
        else:
            log.debug("Parameters changed while a snapshot was copied; it does not count.")


def _local(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach() if isinstance(local, Tensor) else tensor


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Found:
    """A whole snapshot, and the slots that hold its parts.

    Args:
        moment: When it was taken.
        slots: By the rank of those that took it.

    """

    def __init__(self, moment: Moment, slots: Sequence[SharedSlot]) -> None:
        self.moment = moment
        self._slots = slots

    @property
    def count(self) -> int:
        """How many ranks took it together."""
        return len(self._slots)

    def index_of(self, paths: Sequence[str]) -> int | None:
        """Return which part lies in one of these slots, those of one rank; None if none does."""
        return next((index for index, slot in enumerate(self._slots) if slot.path in paths), None)

    def read(self) -> list[Any]:
        """Return the parts by rank, for :func:`~lightning_ft.sharding.shard_tree.put_together`."""
        return [slot.read() for slot in self._slots]


def find_whole(paths: Iterable[str], call: int = 0) -> list[Found]:
    """Return all whole snapshots in the slots of all ranks, the newest first; while nobody writes.

    Args:
        paths: Where the slots are, of living ranks and of dead ones.
        call: The Trainer call in which they were taken.

    """
    parts: dict[tuple[Moment, int], dict[int, SharedSlot]] = {}
    for path in paths:
        slot = SharedSlot(path)
        label = slot.label()
        if label is not None and label.call == call:
            parts.setdefault((label.moment, label.count), {})[label.index] = slot
    whole = [(moment, found) for (moment, count), found in parts.items() if len(found) == count]
    whole.sort(key=lambda item: item[0], reverse=True)
    return [Found(moment, [found[index] for index in range(len(found))]) for moment, found in whole]
