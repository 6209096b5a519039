"""Several training loaders: what a rank trains from is the stream of their combined batches, as under ``ddp``.

Lightning combines them by itself, one batch of each at a time. So each loader is replaced by a part that yields its share
of the combined batch under way, and the parts have one stream behind them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader

from lightning_ft.data.streams import StreamLoader


class CombinedBatches:
    """The batches of several loaders, side by side in a list.

    Args:
        loaders: The loaders of this rank.
        mode: How ``CombinedLoader`` combines them.

    """

    def __init__(self, loaders: Sequence[Any], mode: Any) -> None:
        self._loaders = list(loaders)
        self._mode = mode
        self.sampler = self
        """Whose :meth:`set_epoch` is called."""

    def __len__(self) -> int:
        lengths: list[Any] = [sized_len(loader) for loader in self._loaders]
        lengths = [math.inf if length is None else length for length in lengths]
        length: float = _SUPPORTED_MODES[self._mode]["fn"](lengths)
        if length == math.inf:
            raise TypeError("No loader that ends the epoch has a length.")
        return int(length)

    def __iter__(self) -> Iterator[list[Any]]:
        for batches, _, _ in CombinedLoader(self._loaders, self._mode):
            yield batches

    def set_epoch(self, epoch: int) -> None:
        """Have the samplers of all loaders shuffle for ``epoch``."""
        for loader in self._loaders:
            _set_sampler_epoch(loader, epoch)


class JointLoaders:
    """What the parts share.

    Args:
        combined: The user's loaders, as Lightning combines them.

    """

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined
        self.sources: list[Any] = []
        """The loaders of this rank that have a part already."""
        self.stream: StreamLoader | None = None
        """Of the combined batches; made once all parts are there."""
        self.row: list[Any] | None = None
        """The combined batch under way."""

    def add(self, source: Any) -> "JointPart":
        """Return the part for the next of the loaders."""
        self.sources.append(source)
        return (FirstPart if len(self.sources) == 1 else JointPart)(source, self, len(self.sources) - 1)

    @property
    def is_complete(self) -> bool:
        """Whether all loaders have a part."""
        return len(self.sources) == len(self._combined.flattened)

    def batches(self, sources: Sequence[Any]) -> CombinedBatches:
        """Return what the stream is to yield, of loaders such as these."""
        return CombinedBatches(sources, self._combined._mode)


class JointPart:
    """Stands in Lightning's collection for one of the loaders.

    Args:
        source: The loader; its attributes are readable here too.
        joint: What the parts share.
        index: Which of the loaders this is.

    """

    keeps_position = True

    def __init__(self, source: Any, joint: JointLoaders, index: int) -> None:
        self.source = source
        self._joint = joint
        self._index = index

    def __getattr__(self, name: str) -> Any:
        # A position of its own would be saved beside that of the stream.
        if name.startswith("_") or name in ("source", "state_dict", "load_state_dict", "source_state"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        assert self._joint.stream is not None
        return len(self._joint.stream)

    def __iter__(self) -> "JointPart":
        return self

    def __next__(self) -> Any:
        if self._joint.row is None:
            raise StopIteration
        return self._joint.row[self._index]


class FirstPart(JointPart):
    """The part that moves the stream on, and keeps its position in checkpoints."""

    def __iter__(self) -> "FirstPart":
        iter(self._stream)
        return self

    def __next__(self) -> Any:
        self._joint.row = None
        self._joint.row = next(self._stream)
        return super().__next__()

    @property
    def ticket(self) -> int | None:
        """The ticket of the combined batch under way."""
        return self._stream.ticket

    @property
    def remaining_steps(self) -> int:
        """Whether this epoch has further batches."""
        return self._stream.remaining_steps

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream."""
        return self._stream.state_dict()

    def source_state(self) -> dict[str, Any] | None:
        """Return where the source of the stream is, if it tells."""
        return self._stream.source_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream was."""
        self._stream.load_state_dict(state)

    @property
    def _stream(self) -> StreamLoader:
        assert self._joint.stream is not None
        return self._joint.stream
