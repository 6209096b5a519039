"""A training loader whose position can be saved after any batch, and taken up again by another process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ft.data.position import skip_trained
from lightning_ft.data.random_state import random_state, set_random_state
from lightning_ft.data.sampler_state import sampler_loader, sampler_reader, sampler_state
from lightning_ft.data.skipping import DrawHooks, skipped, told

_END = object()


class ResumableLoader:
    """The user's loader, with a position.

    How it is taken up again depends on the loader. Of a ``DataLoader`` over a map-style dataset, the order is drawn again
    from the random numbers that it was drawn from, and cut. A loader with ``state_dict`` and ``load_state_dict`` gets its
    own state. One with ``epoch_batches(epoch)`` is asked for the epoch's batches, and those are cut. Any other iterable is
    read again, under the same random numbers, up to where it was.

    Args:
        source: Any iterable; its attributes are readable here too.
        current_epoch: Returns the epoch that an iteration belongs to.

    """

    def __init__(self, source: Any, current_epoch: Callable[[], int]) -> None:
        self.source = source
        self.deferred = False
        """True while the position is still to come: nothing is read until then."""
        self.is_read_ahead = False
        """Whether batches are taken before they are trained: then the state before the last one is kept, too."""
        self._current_epoch = current_epoch
        self._batches: Iterator[Any] | None = None
        self._is_stateful = _keeps_state(source)
        self._is_corpus = not self._is_stateful and callable(getattr(source, "epoch_batches", None))
        self._is_sampled = not self._is_stateful and _is_map_style(source)
        self._iterations = 0
        self._taken = 0
        self._before = (0, 0)
        self._opened: dict[str, Any] = {}
        self._states: deque[tuple[int, Any]] = deque(maxlen=3)
        self._resume: dict[str, Any] | None = None
        self._may_be_over = False

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> "ResumableLoader":
        if self.deferred:
            return self
        _set_epoch(self.source, self._current_epoch())
        resume, self._resume = self._resume, None
        self._states.clear()
        self._may_be_over = False
        self._taken = 0
        if resume is None:
            self._opened = {"random": random_state(), "samplers": sampler_state(self.source)}
            self._batches = self._iterate_anew()
        else:
            self._batches = self._iterate_from(resume)
        self._iterations += 1
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        if "first" not in self._opened:  # some loaders draw their order only now
            self._opened["first"] = random_state()
        batch = next(self._batches, _END)
        if batch is _END:
            batch = self._next_iteration()
        self._before = (self._iterations, self._taken)
        self._taken += 1
        self._may_be_over = False
        if self._is_stateful and self.is_read_ahead:
            self._states.append((self._taken, self.source.state_dict()))
        return batch

    def _next_iteration(self) -> Any:
        """A state from the very end of an epoch may mean that nothing is left of it: then the next one begins."""
        if not self._may_be_over:
            raise StopIteration
        self._batches = iter(self.source)
        return next(self._batches)

    # Position.

    def position(self, num_ahead: int, *, between_epochs: bool) -> dict[str, Any]:
        """Return where this loader is.

        Args:
            num_ahead: How many of the batches taken last were not trained.
            between_epochs: Whether the iteration is over.

        """
        state: dict[str, Any] = {"kind": self._kind, "iterations": self._iterations}
        if between_epochs:
            state |= {"taken": 0, "samplers": sampler_state(self.source)}
            if self._is_stateful and not isinstance(self.source, DataLoader):
                state["own"] = self.source.state_dict()
            return state
        taken = max(0, self._taken - num_ahead)
        if num_ahead == 1 and self._before[0] != self._iterations:
            taken = self._before[1]
        state |= {"taken": taken, **self._opened}
        if self._is_stateful:
            known = [*self._states]
            if not known or known[-1][0] != self._taken:
                known.append((self._taken, self.source.state_dict()))
            usable = [(at, own) for at, own in known if at <= taken]
            if usable:
                state["own_at"], state["own"] = usable[-1]
        return state

    def resume(self, position: dict[str, Any]) -> None:
        """Begin the next iteration at ``position``.

        Raises:
            ValueError: If it is the position of another kind of loader.

        """
        if position["kind"] != self._kind:
            raise ValueError(
                f"The checkpoint has the position of a {position['kind']} loader, but the training loader is a"
                f" {self._kind} one. Resume with the loader that the checkpoint was made with, or from the end of an epoch."
            )
        self._resume = position

    def _iterate_anew(self) -> Iterator[Any]:
        if not self._is_sampled:
            return iter(self._batches_of_epoch())
        with told(self.source, self._notes()):
            return iter(self.source)

    def _notes(self) -> DrawHooks:
        """Keep what the samplers are in whenever an order is drawn: of several orders, the last one counts."""
        read = sampler_reader(self.source)
        return DrawHooks(lambda: self._opened.update(samplers=read()), lambda: self._opened.update(samplers_at_first=read()))

    def _batches_of_epoch(self) -> Iterable[Any]:
        batches: Iterable[Any] = self.source.epoch_batches(self._current_epoch()) if self._is_corpus else self.source
        return batches

    @property
    def _kind(self) -> str:
        return "stateful" if self._is_stateful else "map-style" if self._is_sampled else "replayed"

    def _iterate_from(self, position: dict[str, Any]) -> Iterator[Any]:
        is_within = "random" in position  # else between two iterations
        self._opened = {
            name: position[name] for name in ("random", "samplers", "samplers_at_first", "first") if name in position
        }
        self._iterations, self._taken = position["iterations"] - is_within, position["taken"]
        load_samplers = sampler_loader(self.source, position["samplers"])
        load_samplers()
        _set_epoch(self.source, self._current_epoch())
        if not is_within:
            self._opened = {"random": random_state(), "samplers": sampler_state(self.source)}
        if self._is_stateful:
            return self._iterate_from_state(position)
        if self._is_corpus:
            return skip_trained(self._batches_of_epoch(), self._taken)
        if is_within:
            set_random_state(position["random"])
        if self._is_sampled:
            return self._iterate_sampled(position, load_samplers)
        batches: Iterator[Any] = iter(self.source)
        if "first" in position:
            set_random_state(position["first"])
        deque(islice(batches, self._taken), maxlen=0)
        return batches

    def _iterate_sampled(self, position: dict[str, Any], load_samplers: Callable[[], None]) -> Iterator[Any]:
        is_late = self._iterations > 0 and self.source.persistent_workers and self.source._iterator is None
        if "random" not in position and not is_late:
            return self._iterate_anew()
        state = random_state()

        def start() -> None:
            if is_late:
                # Persistent workers start once, which draws a number; the order of a later epoch is not drawn after it.
                set_random_state(state)
            load_samplers()
            _set_epoch(self.source, self._current_epoch())

        at_first = position.get("samplers_at_first")
        load_at_first = (lambda: None) if at_first is None else sampler_loader(self.source, at_first)
        with skipped(self.source, self._taken, DrawHooks(start, load_at_first), later=self._notes()) as skip:
            batches: Iterator[Any] = iter(self.source)
        if "first" in position:
            if not self.source.num_workers:
                set_random_state(position["first"])
            skip.draw()
        return batches

    def _iterate_from_state(self, position: dict[str, Any]) -> Iterator[Any]:
        already = position.get("own_at", 0)
        if "own" in position:
            self.source.load_state_dict(position["own"])  # before `iter`: some loaders block if it comes after
            self._may_be_over = not self._taken
        elif "random" in position:
            set_random_state(position["random"])
        batches: Iterator[Any] = iter(self.source)
        deque(islice(batches, self._taken - already), maxlen=0)
        return batches

    # What Lightning sets on a loader.

    @property
    def worker_init_fn(self) -> Any:
        """That of the source."""
        return self.source.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self.source.worker_init_fn = value

    @property
    def _iterator(self) -> Any:
        """The iteration whose workers Lightning ends after the last epoch: without this they would outlive the fit."""
        kept = self.source._iterator  # of persistent workers
        return self._batches if kept is None else kept

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.source._iterator = value
        if value is None:
            self._batches = None


def _is_map_style(source: Any) -> bool:
    return isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset)


def _keeps_state(source: Any) -> bool:
    if not (callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))):
        return False
    # Of a map-style dataset the order alone is the position, whatever the number of workers.
    return not _is_map_style(source) or hasattr(source.dataset, "state_dict")


def _set_epoch(source: Any, epoch: int) -> None:
    sampler, batch_sampler = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
    for candidate in (sampler, getattr(batch_sampler, "sampler", None)):
        set_epoch = getattr(candidate, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
