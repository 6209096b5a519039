"""Starts the iteration of a ``DataLoader`` behind its first batches, without fetching them."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

_END = object()


@contextmanager
def told(loader: DataLoader[Any], hooks: "DrawHooks") -> Iterator[None]:
    """Have ``iter(loader)``, called under this, tell when its order is drawn; the loader itself is left as it was."""
    name = _name_of_order(loader)
    original = getattr(loader, name)
    vars(loader)[name] = Told(original, hooks)  # not by `setattr`: a loader refuses it once it is made
    try:
        yield
    finally:
        vars(loader)[name] = original


@contextmanager
def skipped(loader: DataLoader[Any], num_batches: int, hooks: "DrawHooks", later: "DrawHooks") -> Iterator["Skip"]:
    """Have ``iter(loader)``, called under this, begin after ``num_batches``; the loader itself is left as it was.

    Args:
        loader: Over a map-style dataset.
        num_batches: How many batches of the order to leave out.
        hooks: Told when that order is drawn.
        later: Told when further ones are: workers that persist keep asking what stood in for the sampler.

    """
    name = _name_of_order(loader)
    original = getattr(loader, name)
    skip = Skip(original, num_batches, hooks, later)
    vars(loader)[name] = skip
    try:
        yield skip
    finally:
        vars(loader)[name] = original
        skip.is_over = True


def _name_of_order(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


@dataclass(frozen=True)
class DrawHooks:
    """Called while a loader starts to draw an order.

    Some samplers draw all of it when they are asked for an iterator, which loaders with workers do twice; most draw it with
    the first item.

    Args:
        on_start: Called before a sampler is asked for an iterator.
        on_first: Called before that is asked for its first item.

    """

    on_start: Callable[[], None]
    on_first: Callable[[], None]


class Told:
    """Stands in for what a loader draws its indices from.

    Args:
        source: What the loader has: a batch sampler, or a sampler if it does not batch.
        hooks: Told when the order is drawn.

    """

    def __init__(self, source: Any, hooks: DrawHooks) -> None:
        self._source = source
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        self._hooks.on_start()
        return self._items(iter(self._source))

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        self._hooks.on_first()
        yield from items


class Skip(Told):
    """Stands in for it and leaves the first items out, once.

    Args:
        source: See :class:`Told`.
        num_batches: How many items to leave out.
        hooks: See :func:`skipped`.
        later: See :func:`skipped`.

    """

    def __init__(self, source: Any, num_batches: int, hooks: DrawHooks, later: DrawHooks) -> None:
        super().__init__(source, later)
        self._num_batches = num_batches
        self._first_hooks = hooks
        self.is_over = False
        """Whether the iteration was started that leaves something out."""
        self._remaining: _Remaining | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.is_over:
            return super().__iter__()
        self._first_hooks.on_start()
        self._remaining = _Remaining(self._source, self._num_batches, self._first_hooks.on_first)
        return self._remaining

    def draw(self) -> None:
        """Draw the order now, as far as that has not happened: it is due when the first batch is fetched."""
        if self._remaining is not None:
            self._remaining.draw()


class _Remaining:
    """Draws the order when the loader's own iterator would: some do it as the iteration starts, most with the first item."""

    def __init__(self, source: Any, num_batches: int, on_first: Callable[[], None]) -> None:
        self._source = source
        self._num_batches = num_batches
        self._on_first = on_first
        # Of a common batch sampler the order itself is cut: a million of its batches would be made for nothing.
        self._batches = None if type(source) is BatchSampler else iter(source)
        self._rest: Iterator[Any] | None = None

    def __iter__(self) -> "_Remaining":
        return self

    def __next__(self) -> Any:
        return next(self.draw())

    def draw(self) -> Iterator[Any]:
        if self._rest is None:
            self._on_first()
            if self._batches is None:
                size = self._source.batch_size
                indices = _skip(iter(self._source.sampler), self._num_batches * size)
                self._rest = iter(BatchSampler(_Once(indices), size, self._source.drop_last))
            else:
                self._rest = _skip(self._batches, self._num_batches)
        return self._rest


def _skip(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Return what is left behind ``count`` items; at least one is drawn, since with it the order is."""
    if count:
        deque(islice(items, count), maxlen=0)
        return items
    first = next(items, _END)
    return iter(()) if first is _END else chain([first], items)


class _Once:
    """A sampler of what is left of another one's order."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices
