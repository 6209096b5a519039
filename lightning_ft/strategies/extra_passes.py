"""Keeps the global batch constant: further passes of a step, with the batches of replicas that are missing.

To Lightning such a batch is part of the one under way. ``training_step`` gets it with the same ``batch_idx``, after the
hooks that transfer it; gradients add up, and so do logged values and metrics. ``on_train_batch_start`` and
``on_train_batch_end`` are called once a step, with the rank's own batch, so that callbacks count the batches that they
would count without faults.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS

from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.rows import Pass, RowPlan
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.strategies.ghost import GhostSteps
from lightning_ft.strategies.step_values import StepValues

log = logging.getLogger(__name__)

_CALL = '`FTStrategy(global_batch="constant")`'
_INSTEAD = 'Use `global_batch="shrink"`.'


class ExtraPasses:
    """The further passes of one rank.

    A replica draws the same random numbers in a step as the others. So a pass that stands for one that is missing draws
    what that one would have drawn, and leaves no trace in this rank's generators or buffers.

    Args:
        trainer: The trainer.
        pl_module: Its module.
        collectives: Of the live ranks.
        ghosts: Makes passes leave no trace that this rank only keeps the others company in.
        end_ghost: Ends that of the batch under way, if it is one.
        begin_ghost: Makes the rest of the batch one.

    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        collectives: Collectives,
        ghosts: GhostSteps,
        end_ghost: Callable[[], None],
        begin_ghost: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._collectives = collectives
        self._ghosts = ghosts
        self._end_ghost = end_ghost
        self._begin_ghost = begin_ghost
        self.loader: ElasticLoader | None = None
        self.is_running = False
        """Whether a further pass is under way."""
        self.is_over = False
        """Whether what is under way is the last pass of the batch that is foreseen."""
        self._states: dict[int, tuple[Any, Any]] = {}
        self._before_batch: Any = None
        self._values: StepValues | None = None
        self._num_unknown = 0

    def check(self) -> None:
        """Refuse a fit in which a step is not one backward pass of each batch.

        Raises:
            MisconfigurationException: Says why.

        """
        if not self._pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{_CALL} needs automatic optimization: in manual optimization nobody but the module itself can run the"
                f" backward passes of missing replicas' batches. {_INSTEAD}"
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in self._trainer.optimizers):
            raise MisconfigurationException(f"{_CALL} with LBFGS, which runs each batch several times. {_INSTEAD}")
        if is_param_in_hook_signature(self._pl_module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(f"{_CALL} with `training_step(dataloader_iter)`. {_INSTEAD}")

    def follow(self, loader: object) -> None:
        """Take further batches from ``loader``.

        Raises:
            MisconfigurationException: If only its own rank can read it.

        """
        if not isinstance(loader, ElasticLoader):
            raise MisconfigurationException(
                f"{_CALL} needs data that every rank can read: one map-style dataset with Lightning's distributed sampler."
                f" Of a stream (an iterable dataset, several loaders, `use_distributed_sampler=False`) nobody else has the"
                f" dead rank's batches. {_INSTEAD}"
            )
        self.loader = loader

    # Within a step.

    def begin_batch(self) -> None:
        """Note what a batch begins with."""
        self._before_batch = _collect_rng_states(include_cuda=self._has_cuda)
        self._values = None

    def begin_step(self) -> None:
        """Note what the first ``training_step`` of a batch begins with."""
        self._states[self._plan.row] = self._before_batch, _collect_rng_states(include_cuda=self._has_cuda)
        self.is_over = not self._plan.has_extra
        self._collectives.counted = None

    def end_step(self) -> None:
        """Forget what belongs to an optimizer step."""
        self._states.clear()

    def covers(self, members: Collection[int]) -> bool:
        """Whether ``members`` have run all batches of the step under way."""
        return self._plan.covers(members)

    def run(self) -> None:
        """Run the further passes that the batch under way has."""
        if self._plan.has_extra:
            self._run_all(_rest_of(self._plan), prefetched=True)

    def take_over(self, members: Sequence[int]) -> None:
        """Run what only ranks that died have run of the step, among ``members``."""
        passes = self._plan.take_over(members)
        log.info("Step %s: %s further passes for what died with a rank.", self._trainer.global_step + 1, len(passes))
        self._run_all(passes, prefetched=False)

    @property
    def _plan(self) -> RowPlan:
        assert self.loader is not None
        assert isinstance(self.loader.plan, RowPlan)
        return self.loader.plan

    @property
    def _has_cuda(self) -> bool:
        return self._pl_module.device.type == "cuda"

    def _run_all(self, passes: Iterable[Pass], *, prefetched: bool) -> None:
        assert self.loader is not None
        results = self._trainer.fit_loop.epoch_loop._results
        ticket, counts = self.loader.ticket, self.loader.has_own_batch
        if not counts:
            self._end_ghost()
        if self._values is None:
            self._values = StepValues(results)
            self._num_unknown = 0
            self._values.end_pass(is_own=counts, num_ranks=self._count_ranks(self._plan.size_of_pass))
        self._values.reopen()
        logger_connector = self._trainer._logger_connector
        kept = results.batch, results.batch_size, results.dataloader_idx, logger_connector._first_loop_iter
        random = _collect_rng_states(include_cuda=self._has_cuda)
        logger_connector._first_loop_iter = False  # or what the first pass logged would be forgotten
        self.is_running = True
        try:
            for tickets in passes:
                numbers = [number for number in tickets.values() if number is not None]
                row = self._plan.row_of(numbers[0])
                is_logged = row == self._plan.row and (prefetched or self._num_unknown > 0)
                self.is_over = prefetched and not self._plan.has_extra
                self._collectives.counted = None
                self._run_one(tickets, row, prefetched)
                is_own = self.loader.has_own_batch and row == self._plan.row
                num_ranks = self._count_ranks(len(numbers)) if prefetched else len(numbers)
                self._values.end_pass(is_own=is_own, num_ranks=num_ranks if is_logged else 0)
                counts = counts or self.loader.has_own_batch
        finally:
            self.is_running = False
            _set_rng_states(random)
            results.batch, results.batch_size, results.dataloader_idx, logger_connector._first_loop_iter = kept
        self._values.combine()
        self.loader.ticket, self.loader.has_own_batch = ticket, counts
        if not counts:
            self._begin_ghost()

    def _count_ranks(self, num_tickets: int) -> int:
        """Return of how many ranks a pass has logged a value: who died may have died before or after it logged its own."""
        counted = num_tickets if self._collectives.counted is None else int(self._collectives.counted)
        self._num_unknown += num_tickets - counted
        return counted

    def _run_one(self, tickets: Pass, row: int, prefetched: bool) -> None:
        assert self.loader is not None
        trainer, module = self._trainer, self._pl_module
        before_batch, before_step = self._states[row]
        results = trainer.fit_loop.epoch_loop._results
        with ExitStack() as stack:
            _set_rng_states(before_batch)
            batch = self.loader.fetch_extra(tickets, prefetched=prefetched)
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
            results.batch, results.batch_size = batch, None
            stack.enter_context(self._buffers_kept() if self.loader.has_own_batch else self._ghosts.step())
            _set_rng_states(before_step)
            epoch_loop = trainer.fit_loop.epoch_loop
            kwargs = epoch_loop._build_kwargs(OrderedDict(), batch, epoch_loop.batch_idx)
            output = epoch_loop.automatic_optimization._training_step(kwargs)
            if output.closure_loss is not None:
                call._call_strategy_hook(trainer, "backward", output.closure_loss, trainer.optimizers[0])

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Undo what a pass does to buffers: the missing replica's own were overwritten by those of rank 0."""
        saved = {name: buffer.detach().clone() for name, buffer in self._pl_module.named_buffers()}
        yield
        for name, buffer in self._pl_module.named_buffers():
            if name in saved and saved[name].shape == buffer.shape:
                buffer.detach().copy_(saved[name])


def _rest_of(plan: RowPlan) -> Iterator[Pass]:
    while (tickets := plan.take_extra()) is not None:
        yield tickets
