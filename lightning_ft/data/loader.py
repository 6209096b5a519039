"""The loader that a rank iterates: the user's sampler decides the order, tickets decide who trains what."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain, zip_longest
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_ft.data.ending_workers import end_workers
from lightning_ft.data.random_state import random_state, under_random_state
from lightning_ft.data.replicas import as_replica, full_length
from lightning_ft.data.rows import Pass, RowPlan
from lightning_ft.data.tickets import TicketPlan

Order = list[int] | list[list[int]]
Result = TypeVar("Result")


class Agreement(Protocol):
    """How a loader learns what all ranks must see alike."""

    def __call__(self, draw: Callable[[], Tensor]) -> Tensor:
        """Collective. Return what rank 0 drew."""


class ElasticLoader:
    """The training loader of one slot.

    Without faults a rank trains exactly the batches that ``DistributedSampler`` would give it, except that no sample is
    repeated to make the ranks even: rank ``r`` of ``R`` takes every ``R``-th sample of the order, in batches. Each such
    batch is a ticket. A custom batch sampler makes the batches of each rank, as under ``ddp``, and they are dealt out whole.

    Args:
        source: The user's loader over a map-style dataset, with Lightning's ``DistributedSampler`` in it; of its
            attributes, those that this class lacks are readable here too.
        slot: The slot whose loader this is.
        num_slots: Slots that the epoch's tickets are dealt to.
        current_epoch: Returns the epoch that an iteration begins.
        agree: Used for samplers whose order is not a function of seed and epoch.
        limit: ``Trainer(limit_train_batches=...)``: batches of a rank, or a fraction of them.
        whole_rows: Whether each step trains as many tickets as if all slots were live.

    """

    keeps_position = True

    def __init__(
        self,
        source: DataLoader[Any],
        slot: int,
        num_slots: int,
        current_epoch: Callable[[], int],
        agree: Agreement,
        limit: int | float = 1.0,
        *,
        whole_rows: bool = False,
    ) -> None:
        self.dataset = source.dataset
        self.sampler: Any = source.sampler
        self.batch_size = source.batch_size
        self.num_workers = source.num_workers
        self._source = source
        self._slot = slot
        self._num_slots = num_slots
        self._current_epoch = current_epoch
        self._agree = agree
        self._batched_by_user = source.batch_sampler is not None and type(source.batch_sampler) is not BatchSampler
        if self._batched_by_user:
            self.sampler = getattr(source.batch_sampler, "sampler", source.sampler)
        self._order: Order | None = None
        self._limit = limit
        self._made_for = num_slots
        """Of how many slots the tickets of this epoch are; not of its own, after a resumption on another number."""
        self._plan_type = RowPlan if whole_rows else TicketPlan
        self.plan: TicketPlan | RowPlan = TicketPlan(0, num_slots)
        self._length = self._make_tickets()
        self.live: tuple[int, ...] = tuple(range(num_slots))
        self.ticket: int | None = None
        self.has_own_batch = True
        """Whether the batch taken last is this rank's own; else it only keeps the others company with it."""
        self.deferred = False
        """True in a rank that is not a member yet: its order and position come with the state that it receives."""
        self.on_take: Callable[[], None] = lambda: None
        self._resumed = False
        self._has_joined = False
        self._inner = self._make_inner()
        self._batches: Iterator[Any] | None = None
        self._round = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> "ElasticLoader":
        is_extra, self._resumed = self._resumed, False
        if not is_extra:
            self._order = None
            if self._made_for != self._num_slots:
                self._made_for = self._num_slots
                self._make_tickets()
            self.plan.begin_epoch(self._current_epoch())
        self._close_round()
        if not self.deferred:
            with self._drawing_nothing() if is_extra else nullcontext():
                self._open_round([])
        return self

    def __next__(self) -> Any:
        if self.plan.epoch != self._current_epoch():  # resumed from the end of an epoch: that one is over
            iter(self)
        tickets = self.plan.take(self.live)
        ticket = tickets.get(self._slot)
        if ticket is None and not tickets:
            self._close_round()
            raise StopIteration
        batch = self._fetch_own(ticket)
        self.on_take()
        return self._ghost_batch() if batch is None else batch

    def fetch_extra(self, tickets: Pass, *, prefetched: bool) -> Any:
        """Return this slot's batch for a further pass of the step under way, or one that does not count.

        Args:
            tickets: What the slots have in the pass.
            prefetched: Whether the plan told of it before.

        """
        batch = self._fetch_own(tickets.get(self._slot), prefetched=prefetched)
        return self._ghost_batch() if batch is None else batch

    @property
    def remaining_steps(self) -> int:
        """How many further batches this epoch has if nobody dies or joins."""
        return self.plan.remaining_steps(self.live)

    def commit(self, contributors: tuple[int, ...]) -> Mapping[int, list[int]]:
        """Record that a step with the gradients of ``contributors`` is committed; return the tickets that are done."""
        if contributors == self.live:
            return self.plan.commit(self.live)
        done = self.plan.commit(contributors)
        for slot in set(self.live) - set(contributors):
            self.plan.remove(slot)
        self.live = tuple(sorted(contributors))
        return done

    def admit(self, joined: list[int]) -> None:
        """Deal tickets to ``joined`` from now on."""
        for slot in joined:
            self.plan.add(slot)
        self.live = tuple(sorted({*self.live, *joined}))

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, the same on every rank."""
        order = None if self._order is None or self._is_function_of_epoch else self._pack(self._order)
        return {"plan": self.plan.state_dict(), "order": order, "num_slots": self._made_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another loader was; steps that were not committed are open again.

        That loader may have been one of another number of slots: what it left open of the epoch is dealt out among these.

        Args:
            state: What :meth:`state_dict` returned. ``"window"`` in it: the gradients of what was in flight are there, too.

        """
        if "num_slots" not in state:
            raise ValueError(
                "The checkpoint has the position of a stream of each rank, but the training data is a map-style dataset that"
                " all ranks read. Resume with the data that it was made with, or from the end of an epoch."
            )
        if state["num_slots"] != self._made_for:
            self._made_for = state["num_slots"]
            self._make_tickets()
        self.plan.load_state_dict(state["plan"])
        for slot in [] if state.get("window") else list(self.plan.in_flight):
            self.plan.remove(slot)
        self._order = None if state["order"] is None else self._unpack(state["order"])
        self._close_round()
        self._resumed = True

    def load_trained(self, epoch: int, num_slots: int, num_batches: int) -> None:
        """Continue behind the first ``num_batches`` that each of ``num_slots`` ranks had by `DistributedSampler`.

        Raises:
            ValueError: If the order is not a function of seed and epoch.

        """
        if not self._is_function_of_epoch:
            name = type(self._source.batch_sampler if self._batched_by_user else self.sampler).__name__
            raise ValueError(
                f"The checkpoint of another strategy can't be resumed in the middle of an epoch: in what order"
                f" `{name}` drew is not in it. Resume with the strategy that it was made with, or from the end of an epoch."
            )
        self._made_for = num_slots
        self._make_tickets()
        plan = TicketPlan(self.plan.num_tickets, self._num_slots)
        plan.begin_with(epoch, [range(min(num_slots * num_batches, plan.num_tickets), plan.num_tickets)])
        self.load_state_dict({"plan": plan.state_dict(), "order": None, "num_slots": num_slots})

    def load_handed_out(self, state: dict[str, Any], live: tuple[int, ...]) -> None:
        """Take the position that a live peer handed out, among ``live`` slots, with its iteration under way."""
        self.load_state_dict(state)
        self._resumed, self._has_joined, self.deferred, self.live = False, True, False, live

    # Order and batches.

    def _fetch_own(self, ticket: int | None, *, prefetched: bool = True) -> Any:
        self.ticket = ticket
        batch = None
        if ticket is not None:
            batch = self._fetch(ticket) if prefetched else self._fetcher().fetch(self._indices(ticket))
        self.has_own_batch = batch is not None
        return batch

    def _fetch(self, ticket: int) -> Any:
        if self._batches is None or self._round != self.plan.round:
            with self._drawing_nothing():
                self._open_round([ticket])
        assert self._batches is not None
        try:
            return next(self._batches)
        except StopIteration:  # would end the epoch as if nothing were wrong
            raise RuntimeError(f"The loader of slot {self._slot} ended before ticket {ticket}.") from None

    @contextmanager
    def _drawing_nothing(self) -> Iterator[None]:
        """An extra start of workers must not shift the random numbers that training and later epochs draw."""
        generator = self._source.generator
        before = None if generator is None else generator.get_state()
        with torch.random.fork_rng(devices=[]):
            yield
        if before is not None:
            generator.set_state(before)

    @property
    def _is_function_of_epoch(self) -> bool:
        return type(self.sampler) is DistributedSampler and not self._batched_by_user

    def _make_tickets(self) -> int:
        """Begin a plan of all tickets of an epoch; return how many batches each slot has."""
        num_tickets = self._count_tickets()
        length = -(-num_tickets // self._made_for)
        allowed = int(length * self._limit) if isinstance(self._limit, float) else self._limit
        self.plan = self._plan_type(min(num_tickets, allowed * self._made_for), self._num_slots)
        return length

    def _count_tickets(self) -> int:
        if self._batched_by_user:
            batch_sampler: Any = self._source.batch_sampler
            lengths: list[int] = self._of_each_replica(lambda: len(batch_sampler))
            self._num_batches_by_user = sum(lengths)
            return self._num_batches_by_user
        num_samples = full_length(self.sampler)
        size = self.batch_size or 1
        counts = [len(range(slot, num_samples, self._made_for)) for slot in range(self._made_for)]
        if self._source.drop_last:
            return sum(count // size for count in counts)
        return sum(-(-count // size) for count in counts) - self._made_for + self._num_last(num_samples)

    def _num_last(self, num_samples: int) -> int:
        """How many slots share the last incomplete row of batches.

        Usually all. But where ``DistributedSampler`` would repeat samples so that all have two, no slot is left with one:
        some models cannot train on that (BatchNorm).
        """
        rest = num_samples % (self._made_for * (self.batch_size or 1))
        is_thin = (self.batch_size or 1) > 1 and self._made_for < rest < 2 * self._made_for
        return rest // 2 if is_thin else self._made_for

    def _epoch_order(self) -> Order:
        if self._order is None:
            if self._is_function_of_epoch:
                self.sampler.set_epoch(self.plan.epoch)
                self._order = self._draw()
            else:
                self._order = self._unpack(self._agree(lambda: self._pack(self._draw())))
                self._check_length(self._order)
        return self._order

    def _draw(self) -> Order:
        if not self._batched_by_user:
            with as_replica(self.sampler, 0, 1):
                return list(self.sampler)
        rows = zip_longest(*self._of_each_replica(lambda: list(self._source.batch_sampler)))  # type: ignore[arg-type]
        return [batch for row in rows for batch in row if batch is not None]

    def _of_each_replica(self, evaluate: Callable[[], Result]) -> list[Result]:
        """What every rank's batch sampler gives, if it is one over a ``DistributedSampler``; all draw alike."""
        if not isinstance(self.sampler, DistributedSampler):
            return [evaluate()]
        self.sampler.set_epoch(self.plan.epoch)
        state, results = random_state(), []
        for replica in range(self._made_for):
            is_last = replica == self._made_for - 1
            with as_replica(self.sampler, replica, self._made_for), under_random_state(None if is_last else state):
                results.append(evaluate())
        return results

    def _check_length(self, order: Order) -> None:
        expected = self._num_batches_by_user if self._batched_by_user else full_length(self.sampler)
        if len(order) != expected:
            sampler = self._source.batch_sampler if self._batched_by_user else self.sampler
            raise ValueError(
                f"`{type(sampler).__name__}` yielded {len(order)} items in epoch {self.plan.epoch}, but its `__len__` said"
                f" {expected}. Tickets are dealt by that length: make the two agree."
            )

    def _pack(self, order: Order) -> Tensor:
        """As one tensor: the lengths of all batches first where the user makes them."""
        if not self._batched_by_user:
            return torch.tensor(order, dtype=torch.int64)
        flat = list(chain.from_iterable(order))  # type: ignore[arg-type]
        return torch.tensor([len(order), *(len(batch) for batch in order), *flat])  # type: ignore[arg-type]

    def _unpack(self, packed: Tensor) -> Order:
        values: list[int] = packed.tolist()
        if not self._batched_by_user:
            return values
        lengths, flat = values[1 : 1 + values[0]], iter(values[1 + values[0] :])
        return [[next(flat) for _ in range(length)] for length in lengths]

    def _indices(self, ticket: int) -> Any:
        order = self._epoch_order()
        if self._batched_by_user:
            return order[ticket]
        index, slot = divmod(ticket, self._made_for)
        if self.batch_size is None:
            return order[slot + self._made_for * index]
        stride = self._made_for * self.batch_size
        in_row = self._made_for if index < len(order) // stride else self._num_last(len(order))
        return order[slot + stride * index : stride * (index + 1) : in_row]

    def _open_round(self, taken: list[int]) -> None:
        """Start prefetching the tickets of this slot: those just taken, then those that it takes next."""
        self._close_round()
        self._round = self.plan.round
        self._upcoming.tickets = lambda: chain(taken, self.plan.upcoming(self._slot))
        # A `DataLoader` draws a number of its own between asking the sampler for an iterator and for the first item.
        ask: Any = getattr(type(self._source.batch_sampler), "__iter__", None)
        # With persistent workers it does so only once, which the other ranks did before this one joined them.
        drew_before = self._has_joined and self._inner.persistent_workers
        if drew_before or (self._batched_by_user and not inspect.isgeneratorfunction(ask)):
            self._epoch_order()
        with torch.random.fork_rng(devices=[], enabled=drew_before):
            self._batches = iter(self._inner)
        self._epoch_order()

    def _close_round(self) -> None:
        batches, self._batches = self._batches, None
        if not self._inner.persistent_workers:
            end_workers(batches)

    def close(self) -> None:
        """End the workers: no batch will be taken any more. May be called twice."""
        self._close_round()
        kept, self._inner._iterator = self._inner._iterator, None  # by `persistent_workers`
        end_workers(kept)

    def _make_inner(self) -> DataLoader[Any]:
        source = self._source
        self._upcoming = _Upcoming(self._indices)
        sampling = {"sampler": self._upcoming} if source.batch_size is None and not self._batched_by_user else {}
        return DataLoader(
            source.dataset,
            **({"batch_size": None, **sampling} if sampling else {"batch_sampler": self._upcoming}),
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=source.generator,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def _ghost_batch(self) -> Any:
        """Any batch of the epoch, for a rank that must take part in the step but has none of its own."""
        fetcher = self._fetcher()
        tickets = range(self.plan.num_tickets)
        first = self._slot % len(tickets)
        # Nearly always the first one is it. If all are None, Lightning skips this step, on every rank alike.
        batches = (fetcher.fetch(self._indices(ticket)) for ticket in chain(tickets[first:], tickets[:first]))
        return next((batch for batch in batches if batch is not None), None)

    def _fetcher(self) -> _MapDatasetFetcher:
        """What fetches in this process."""
        auto_collation = self.batch_size is not None or self._batched_by_user
        return _MapDatasetFetcher(self.dataset, auto_collation, self._source.collate_fn, drop_last=False)

    @property
    def worker_init_fn(self) -> Any:
        """Forwarded, so that Lightning can seed the workers."""
        return self._inner.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._inner.worker_init_fn = value


class _Upcoming:
    """The inner loader's sampler: the index lists of the tickets that this slot trains next."""

    def __init__(self, indices: Callable[[int], Any]) -> None:
        self._indices = indices
        self.tickets: Callable[[], Iterator[int]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:  # a loader with workers asks twice before it fetches anything
        return map(self._indices, self.tickets())
