"""A Trainer call while its membership changes: what happens between two batches, and what follows a change."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ft.data.loader import ElasticLoader
from lightning_ft.data.rows import RowPlan
from lightning_ft.data.streams import StreamLoader
from lightning_ft.data.tickets import TicketPlan
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import Change, Engine, SoloEngine
from lightning_ft.elastic.replica import ReplicaLost
from lightning_ft.events.log import EventLog
from lightning_ft.loops import logged_results
from lightning_ft.sharding.mesh import at_its_ranks, replica_mesh
from lightning_ft.sharding.shard_tree import put_back, take_apart
from lightning_ft.strategies import changing_modules, joining, leadership, own_results, rewinding, source_states, tuning
from lightning_ft.strategies.buffers import BufferSync
from lightning_ft.strategies.commits import Commits
from lightning_ft.strategies.complete_evaluation import CompleteEvaluation
from lightning_ft.strategies.data_shares import DataShares
from lightning_ft.strategies.epoch_length import set_length, set_length_of_resumed, set_length_while_fetching
from lightning_ft.strategies.evaluation import EvaluationShards
from lightning_ft.strategies.extra_passes import ExtraPasses
from lightning_ft.strategies.ghost import GhostSteps
from lightning_ft.strategies.lost_streams import StreamsLostExit, describe_left
from lightning_ft.strategies.preemption import Preemption, stopped
from lightning_ft.strategies.reduction import GradientReducer, Reduced
from lightning_ft.strategies.replica_memory import ReplicaMemory
from lightning_ft.strategies.resumption import go_on_from_other_strategy, load_positions_late, name_positions
from lightning_ft.strategies.skipped_steps import allow_skipped_steps
from lightning_ft.strategies.startup import StartupRecord
from lightning_ft.strategies.state_digest import state_digest
from lightning_ft.strategies.training_data import TrainingData, TrainLoader

log = logging.getLogger(__name__)


class LiveTraining:
    """Keeps one rank's trainer in step with the live ranks.

    Args:
        trainer: The trainer.
        pl_module: Its module.
        engine: Knows the membership.
        collectives: Of the live ranks.
        events: Where it is recorded.
        startup: Ends with the first batch.
        constant_batch: Whether the live ranks train the batches of missing ones in the same step.

    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        engine: Engine,
        collectives: Collectives,
        events: EventLog,
        startup: StartupRecord,
        *,
        constant_batch: bool = False,
    ) -> None:
        self.shards = EvaluationShards()
        self.data: TrainingData | None = None
        self.loader: TrainLoader | None = None
        self.reducer: GradientReducer | None = None
        self.buffers: BufferSync | None = None
        self.memory: ReplicaMemory | None = None
        self.commits = Commits(events)
        self.batch = 0
        """Number of the batch under way in this call, the same on all ranks."""
        self.has_reduced = False
        """Whether gradients were averaged in the batch under way."""
        self.averages_anew = False
        """Whether the next average is of the same step as the one before, which is not applied."""
        self.is_handing_out = False
        """Whether what is saved is for a rank that joins; only one rank saves it."""
        self.from_memory = False
        """Whether all ranks begin this call again, with what is in memory of those that are gone."""
        self.stops_for_streams = False
        """Whether the call ends rather than an epoch that lacks batches of ranks which are not back."""
        self.may_pause: Callable[[], bool] = lambda: True
        self.on_abandon: Callable[[], None] = lambda: None
        self.on_batch_end: Callable[[], None] = lambda: None
        self.trainer = trainer
        self.preemption = Preemption(trainer, engine)
        self._pl_module = pl_module
        self._engine = engine
        self._collectives = collectives
        self._events = events
        self._startup = startup
        self._batch = ExitStack()
        self._ghosts = GhostSteps(trainer, pl_module, collectives)
        self.num_changes = 0
        """How often the ranks agreed in this call that others take part; it grows at the same batch on all of them."""
        self.extra: ExtraPasses | None = None
        """The batches of missing replicas, if the global batch is constant."""
        if constant_batch:
            self.extra = ExtraPasses(trainer, pl_module, collectives, self._ghosts, self._batch.close, self._begin_ghost)
        self._shares = DataShares(engine)
        self._slots: tuple[int, ...] = ()
        self._replayed: bool | None = None
        self._pause_agreed = False
        self._lost_streams: StreamsLostExit | None = None
        self._own_groups: list[Any] = []
        self._received: dict[str, Any] | None = None
        self._taken_back: dict[str, Any] | None = None
        self._own_results: dict[str, Any] | None = None
        self._handed_batch = 0
        self._is_known_elsewhere = self._is_unknown = False  # the position in a checkpoint that has none for the loader
        self._is_changed = True  # since the last checksum
        self._logger_versions: list[Any] | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots among which data is divided, sorted; if slots share batches, the numbers of these shares.

        What all ranks agreed on, at the start or in a reduction, and not what this rank knows of the membership: it may
        learn of a death an operation earlier or later than others, and then they would divide differently.
        """
        return self._slots

    def agree_on_slots(self) -> None:
        """Collective. Divide data among those that start this call together."""
        self._slots = self._shares.of(self._collectives.broadcast_object(list(self._engine.members)))

    def watch_evaluation(self) -> None:
        """Have others evaluate the share of a rank that dies in validation or test."""
        trainer = self.trainer
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            CompleteEvaluation(
                trainer,
                loop,
                engine=self._engine,
                events=self._events,
                ghosts=self._ghosts,
                slots=lambda: self._slots,
                is_sending=lambda: not trainer.testing and self.buffers is not None and self.buffers.sends_next,
            ).watch()

    def enter(self) -> None:
        """Get a word in before every batch, and keep Lightning from synchronizing the ranks on its own for each."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        if self.memory is not None:
            self._survive(self.trainer.fit_loop, self.memory)
        advance = type(epoch_loop).advance.__get__(epoch_loop)
        on_advance_end = type(epoch_loop).on_advance_end.__get__(epoch_loop)

        def advance_elastically(data_fetcher: Any) -> None:
            self._before_batch()
            with self._batch:  # ends a ghost step, if this becomes one
                advance(data_fetcher)
                self.on_batch_end()
                self.commits.end_batch(self.batch)
            if self._lost_streams is not None:
                self.preemption.agreed = True
                raise self._lost_streams

        def end_advance(data_fetcher: Any) -> None:
            if self.preemption.agreed and epoch_loop._should_check_val_fx(data_fetcher):
                self.preemption.validation_due = True
                raise stopped()  # the grace may be too short for it: the resumed run begins with it
            on_advance_end(data_fetcher)

        epoch_loop.advance = advance_elastically  # type: ignore[method-assign]
        epoch_loop.on_advance_end = end_advance  # type: ignore[method-assign]
        allow_skipped_steps(self.trainer)
        load_positions_late(self.trainer, self._after_resumption)
        name_positions(self.trainer, is_solo=isinstance(self._engine, SoloEngine), on_load=self._note_lacking_position)
        epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _note_lacking_position(self, is_known: bool) -> None:
        self._is_known_elsewhere, self._is_unknown = is_known, not is_known

    def _after_resumption(self) -> None:
        is_there = self.has_received or not self._is_known_elsewhere
        if self.loader is not None and not self.loader.deferred and is_there:
            if self._is_unknown:
                go_on_from_other_strategy(self.trainer, self.loader, self._shares.count)
            set_length_of_resumed(self.trainer, self.loader)

    def _survive(self, fit_loop: Any, memory: ReplicaMemory) -> None:
        """Have the only replica go on from an earlier state when it lost a rank, whatever it was doing."""
        run = type(fit_loop).run.__get__(fit_loop)

        def run_on() -> None:
            is_back = False
            with memory.in_use():
                while True:
                    try:
                        if is_back:
                            self._go_back(memory)
                            rewinding.run_again(self.trainer, run)
                        else:
                            run()
                        break
                    except ReplicaLost:
                        is_back = True
            memory.leave_module()

        fit_loop.run = run_on

    def _go_back(self, memory: ReplicaMemory) -> None:
        """Collective. Take everything back to the newest snapshot, with the ranks that are left."""
        rewinding.wait_for_copies(self.trainer)
        state = memory.go_back()
        assert self.loader is not None
        self._abandon_batch()
        if self.reducer is not None:
            self.reducer.collectives_inside = state["collectives_inside"]
        if self.buffers is not None:
            self.buffers.due = state["buffers_due"]
        self.loader.deferred = True
        rewinding.take_back(self.trainer, state["training"])
        memory.restore(state)
        self._divide_among(self._shares.of(self._engine.members))
        self._load_position(state)
        self._taken_back, self._handed_batch = state, state["batch"]

    def _abandon_batch(self) -> None:
        """Forget what the batch that failed has left behind."""
        self._pause_agreed = False
        self._ghosts.withdraw()
        self.commits.abandon()
        self.on_abandon()

    # Batches.

    @property
    def has_own_batch(self) -> bool:
        """Whether the batch under way counts; otherwise this rank only keeps the others company."""
        return self._replayed if self._replayed is not None else self.loader is None or self.loader.has_own_batch

    @contextmanager
    def as_batch(self, is_own: bool) -> Iterator[None]:
        """Let an earlier batch of the step be the one under way: it is run again, and counts or does not."""
        weight = self._collectives.weight
        self._replayed, self._collectives.weight = is_own, float(is_own)
        try:
            yield
        finally:
            self._replayed, self._collectives.weight = None, weight

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch under way is the last one of its epoch."""
        return self.loader is None or self.loader.remaining_steps == 0

    def follow_loader(self, dataloader: object) -> object:
        """Collective. Train from ``dataloader``; return what Lightning iterates in its place."""
        assert self.data is not None
        replacement, loader = self.data.make_loader(dataloader)
        if loader is not None:
            is_coming = self._engine.alone and not isinstance(self._engine, SoloEngine)
            loader.deferred = is_coming or (self.from_memory and self._startup.open)
            if isinstance(loader, ElasticLoader) and not self._engine.alone:
                loader.live = self._slots
            loader.on_take = self._on_take
            if isinstance(loader, StreamLoader):
                loader.on_hand_over = lambda streams: self._tell_handed_over(loader.plan.epoch, streams)
            self.loader = loader
            if self.extra is not None:
                self.extra.follow(loader)
        return replacement

    def after_reduction(self, reduced: Reduced) -> None:
        """Take in what all ranks learned from the reduction of the step under way."""
        self.has_reduced = True
        if self.memory is not None:
            self.memory.fence()  # optimizers step next
        self._pause_agreed = self._pause_agreed or reduced.join or reduced.hold
        if reduced.stop:
            self.preemption.agree()
        self.preemption.has_trained = True
        shares = self._shares.of(reduced.members)
        self._divide_among(shares)
        if self.loader is not None:
            done = self.loader.commit(shares)
            if self.averages_anew:
                self._forget_average(reduced.members)
            if self.extra is not None:
                self.extra.end_step()
            if isinstance(self.loader, StreamLoader) and self._pause_agreed:
                self.loader.expect_more()
            if isinstance(self.loader, StreamLoader) and not self.loader.remaining_steps:
                self._end_streams(self.loader)
            set_length(self.trainer, self.loader)
            done = {self._shares.first_slot(share): tickets for share, tickets in done.items()}
            self.commits.averaged(self.loader.plan.epoch, done, reduced.members)

    def _forget_average(self, members: Sequence[int]) -> None:
        """Take back that the batches of others than ``members`` are done: the step is averaged anew, without them.

        Streams can't be wound back: what others had of them is not trained.
        """
        self.averages_anew = False
        tickets = self.commits.leave(members)
        if isinstance(self.loader, ElasticLoader) and isinstance(self.loader.plan, TicketPlan):
            self.loader.plan.reopen(tickets)

    def _end_streams(self, loader: StreamLoader) -> None:
        """Say what is not trained in this epoch, since its slot is not back."""
        left = loader.left_by(set(range(self._shares.count)) - set(self._slots))
        if left and self.stops_for_streams:
            loader.expect_more()  # for those who resume: neither the epoch is over, nor is a validation due
            self._lost_streams = StreamsLostExit(loader.plan.epoch, left)
        elif left and self._engine.rank == 0:
            self._events.emit("streams_left", epoch=loader.plan.epoch, batches=left)
            log.warning("Epoch %s ends without %s.", loader.plan.epoch, describe_left(left))

    def _tell_handed_over(self, epoch: int, streams: dict[int, int]) -> None:
        if self._engine.rank == 0:
            self._events.emit("streams_taken", epoch=epoch, streams=streams)
            what = ", ".join(f"that of rank {stream}" for stream in streams.values())
            log.info("Ranks that are through with their data in epoch %s read what nobody reads: %s.", epoch, what)

    def _on_take(self) -> None:
        assert self.loader is not None
        trainer, plan = self.trainer, self.loader.plan
        self._engine.activity.enter("loader")  # until `batch_to_device`
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0 and not tuning.is_searching(trainer):
            row = {"global_batch": plan.global_batch} if isinstance(plan, RowPlan) and plan.global_batch else {}
            self._events.emit("epoch", epoch=plan.epoch, num_tickets=plan.num_tickets, **row)
        set_length_while_fetching(trainer, self.loader)
        self._ghosts.withdraw()
        if not self.loader.has_own_batch:
            self._begin_ghost()

    def _begin_ghost(self) -> None:
        self._batch.enter_context(self._ghosts.step())

    def _before_batch(self) -> None:
        """Collective. At a batch boundary: enter as a joiner, let joiners in."""
        has_joined = self._received is not None
        self.batch += 1
        self.has_reduced = False
        if self._received is not None:
            self._finish_joining(self._received)
        if self._taken_back is not None:
            self._finish_going_back(self._taken_back)
        self._startup.close()
        searching = self.commits.untold = tuning.is_searching(self.trainer)
        if not searching:  # which is done without the loggers, and with nobody who comes meanwhile
            if self._logger_versions is None:
                self._logger_versions = self._collectives.broadcast_object(leadership.logger_versions(self.trainer))
                leadership.adopt_versions(self.trainer, self._logger_versions)
            if has_joined or (self._pause_agreed and self.may_pause()):
                self._pause()
            if self.memory is not None and self.may_pause():
                self.memory.at_boundary(self._put_down)
            self._tell_state()
        if isinstance(self.loader, StreamLoader):
            self._begin_batch(self.loader)
        if self.extra is not None:
            self.extra.begin_batch()
        replicas = f"{self._engine.replica.count}/{self._engine.num_slots // self._engine.replica.size}"
        self.trainer._logger_connector._progress_bar_metrics["replicas"] = replicas  # type: ignore[assignment]

    def _tell_state(self) -> None:
        """After each change of the membership: record what this rank holds, so that ranks which differ are found."""
        if self._engine.num_slots == 1 or not self._is_changed:
            return
        self._is_changed, replica = False, self._engine.replica
        parameters = (parameter for parameter in self._pl_module.parameters() if parameter.requires_grad)
        digest = state_digest(parameters, self.trainer.optimizers)
        shard = {"shard": f"{replica.shard}/{replica.size}"} if replica.size > 1 else {}
        self._events.emit("checksum", step=self.trainer.global_step, digest=digest, **shard)

    def _begin_batch(self, loader: StreamLoader) -> None:
        """Collective. Learn who has a batch, and let those in who wait: they may have some when nobody else has."""
        assert self.data is not None
        loader.begin_batch()
        while self.data.pause_agreed and loader.is_at_step_boundary and self.may_pause():
            self._pause_agreed = True
            self._pause()
            loader.begin_batch()
        set_length(self.trainer, loader)

    def _pause(self) -> None:
        """Collective. Let joiners in, if that was agreed."""
        if self._pause_agreed:
            self._admit()
        if self.preemption.ask_all("after a pause"):  # which may have been long
            raise stopped()

    # Joining.

    def _admit(self) -> None:
        self._pause_agreed = False
        started = time.monotonic()
        # Once, even if too few are left: ranks that learn of a death sooner than others would wait here alone. The next
        # reduction tells all of them alike.
        joined = self._engine.admit_joiners(self._hand_out) if self.memory is None else self._admit_to(self.memory)
        self.num_changes += bool(joined)
        shares = self._shares.of(joined)
        self._divide_among((*self._slots, *shares))
        if isinstance(self.loader, ElasticLoader) and joined:
            self.loader.admit(list(shares))
            set_length(self.trainer, self.loader)
        self._events.emit("admitted", joined=joined, ms=round(1e3 * (time.monotonic() - started), 2))

    def _admit_to(self, memory: ReplicaMemory) -> list[int]:
        """Let joiners into the replica: all find the state in memory, and divide it anew."""
        moment = memory.prepare_admission(self._put_down)
        if moment is None:
            return []
        joined = self._engine.admit_joiners(
            lambda joined: {"moment": list(moment), "slots": sorted({*self._slots, *joined})}
        )
        if joined:
            memory.grow(moment)
        return joined

    def _hand_out(self, joined: Sequence[int]) -> dict[str, Any]:
        assert self.loader is not None
        self.is_handing_out = True
        try:
            training = self._collect_state()
        finally:
            self.is_handing_out = False
        return {
            "training": training,
            "loader": self.loader.state_dict(),
            "slots": sorted({*self._slots, *self._shares.of(joined)}),
            "logger_versions": self._logger_versions,
            "collectives_inside": None if self.reducer is None else self.reducer.collectives_inside,
            "batch": self.batch,
            "buffers_due": self.buffers is not None and self.buffers.due,
        }

    def _put_down(self) -> dict[str, Any]:
        """Return what is handed out through memory, where each rank adds what it alone knows."""
        states = self.loader.source_states() if isinstance(self.loader, StreamLoader) else {}
        return {**self._hand_out([]), "sources": source_states.pack(states)}

    def _load_position(self, state: dict[str, Any]) -> None:
        assert self.loader is not None
        self.loader.load_handed_out({**state["loader"], "sources": state.get("sources", {})}, self._slots)

    @property
    def has_received(self) -> bool:
        """Whether this rank is a joiner that has the state of the others."""
        return self._received is not None

    def receive(self) -> dict[str, Any]:
        """Return the checkpoint that a live rank hands out to this joiner."""
        trainer = self.trainer
        # All that a joiner can do alone comes first: from here on the others wait for it.
        joining.set_up_data(trainer)
        tuning.leave_out(trainer)
        state = self._take_over() if self.from_memory else self._ask_for_state()
        joining.set_up_data(trainer, state["training"])
        assert self.loader is not None
        self._divide_among(state["slots"])
        self._load_position(state)
        self._handed_batch = state["batch"]
        self._logger_versions = state["logger_versions"]
        leadership.adopt_versions(trainer, state["logger_versions"])
        if self.reducer is not None:
            self.reducer.collectives_inside = state["collectives_inside"]
        if self.buffers is not None:
            self.buffers.due = state["buffers_due"]
        self._received = state["training"]
        self._own_groups = [optimizer.param_groups for optimizer in trainer.optimizers]
        changing_modules.adopt_groups(self._pl_module, trainer.optimizers, self._received["groups"])
        changing_modules.adopt_shapes(self._pl_module, self._received["shapes"])
        return joining.checkpoint_of(self._received)

    def _ask_for_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._engine.join()
        if self.memory is not None:
            return {**self.memory.receive(state["moment"]), "slots": state["slots"]}
        if self._engine.replica.size > 1:
            mesh = replica_mesh(self._engine, self._pl_module.device.type)
            with at_its_ranks(self._engine, mesh):
                state["training"] = put_back(state["training"], mesh)
        return state

    def _take_over(self) -> dict[str, Any]:
        assert self.memory is not None
        state = self.memory.take_over()
        self._own_results = state["own_results"]
        return {**state, "slots": self._engine.members}

    def _collect_state(self) -> Any:
        """Return the state of the training, of what is sharded the part that this rank and the joiner hold."""
        state = joining.collect_state(self.trainer)
        return take_apart(state) if self._engine.replica.size > 1 else state

    def _finish_joining(self, state: dict[str, Any]) -> None:
        self._received = None
        joining.begin_epoch(self.trainer, state, self._own_groups)
        tuning.take_part(self.trainer)
        self.batch = self._handed_batch
        self._engine.enter()
        joining.enter_loop(self.trainer, state)
        if self._own_results is not None:
            own_results.take_back(self.trainer, self._own_results)
        if self.loader is not None:
            set_length(self.trainer, self.loader)
        self._events.emit("joined", step=self.trainer.global_step, epoch=self.trainer.current_epoch)

    def _finish_going_back(self, state: dict[str, Any]) -> None:
        self._taken_back = None
        self.batch = self._handed_batch
        rewinding.finish(self.trainer, state["training"], state["own_results"])
        if self.loader is not None:
            set_length(self.trainer, self.loader)

    # Changes.

    def after_change(self, change: Change) -> None:
        """Let the leadership follow a change of membership."""
        self._is_changed = True
        if change.before and change.before[0] != self._engine.slot and change.members[0] == self._engine.slot:
            self._events.emit("leader", before=change.before[0])
            leadership.take_over(self.trainer, self._pl_module, self._logger_versions or [])
        if change.dead and self.trainer.predicting:  # nobody else can write or return what it predicted
            slots = [slot for slot, _ in change.dead]
            self._events.emit("incomplete", stage="predict", step=self.trainer.global_step, slots=slots)
        lacks_values = bool(change.dead) and logged_results.has_epoch_values(self.trainer)
        if lacks_values:
            slots = [slot for slot, _ in change.dead]
            self._events.emit("incomplete", stage="train", step=self.trainer.global_step, slots=slots)
        if self._engine.rank == 0:
            is_one_replica = self.memory is not None
            _tell(change, self._engine, self.trainer, is_one_replica=is_one_replica, lacks_values=lacks_values)

    def _divide_among(self, slots: Iterable[int]) -> None:
        """Divide the next evaluation among ``slots``; one under way keeps its shards."""
        slots = tuple(sorted(set(slots)))
        if slots != self._slots:
            self._slots = slots
            self.num_changes += 1
            self.shards.follow(self.trainer, slots.index(self._shares.own), len(slots))


def _tell(change: Change, engine: Engine, trainer: Trainer, *, is_one_replica: bool, lacks_values: bool) -> None:
    alive = f"{engine.replica.count} of {engine.num_slots // engine.replica.size} replicas"
    if is_one_replica:
        alive = f"{len(change.members)} of {engine.num_slots} ranks"
    stage = trainer.state.stage
    for slot, how in change.dead:
        if trainer.training:
            where, lost = f"in step {trainer.global_step + 1}", ", the step was not lost"
        elif stage is None:
            where, lost = "when the call was over for the others", ""
        else:
            where = f"during {stage.value}"
            lost = (
                ", its share of it is missing"
                if trainer.predicting or engine.replica.size > 1
                else ", the others evaluate its share if they can read it"
            )
        if is_one_replica:
            lost = ", from the newest snapshot"
        if lacks_values:
            lost += "; means and metrics of this epoch lack what it logged"
        log.warning("Slot %s died (%s) %s; %s go on%s.", slot, how, where, alive, lost)
    joined = sorted(set(change.members) - set(change.before))
    if change.reason == "join" and joined:
        names = f"Slot {joined[0]} is" if len(joined) == 1 else f"Slots {', '.join(map(str, joined))} are"
        rank_zero_info(f"{names} back after step {trainer.global_step}; {alive}.")
