"""A second opinion on a step from other replicas: each runs the batches of the one before it, with the same weights."""

import logging
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.seed import _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ft.loops.own_gradient import OwnGradient
from lightning_ft.loops.step_state import StepState
from lightning_ft.loops.window import MicroBatch, StepWindow
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.gradient_norm import gradient_norm
from lightning_ft.rerun.passes import Passes
from lightning_ft.rerun.state_machine import RerunStateMachine
from lightning_ft.rerun.states import RerunDiagnostic
from lightning_ft.rerun.step_values import Measured, StepValidation, measure
from lightning_ft.trainer.slots import gather_by_slot, is_elastic, replica_of, shard_of, slot_of

log = logging.getLogger(__name__)

_PERSISTENT, _CORRECT = RerunDiagnostic.PERSISTENT_ERROR, RerunDiagnostic.CORRECT_RESULT


@dataclass(frozen=True)
class Heard:
    """What a rank says after it ran the batches of another one.

    Args:
        of: Slot whose batches it ran.
        same: For each finding of that slot, by its index, whether the value came out the same.
        norm: The norm of that slot's own gradient, as this rank computes it.
        own_norm: That of its own.

    """

    of: int
    same: dict[int, bool]
    norm: float
    own_norm: float


class PeerOpinion:
    """Asks the other replicas about values that a rank computed twice.

    All ranks are in it, since passes may call collectives: each sends its batches and random numbers to the next one,
    and runs those of the one before, with its own copy of the weights. Where ranks share one, each runs those of the rank
    that holds the same shard in the replica before, so that a replica runs another one's step as a whole. What comes out
    otherwise elsewhere was computed wrongly. An average that is bad is traced to the rank, or all ranks of the replica,
    whose own gradient comes out otherwise elsewhere.

    Args:
        trainer: The trainer.
        pl_module: Its module.
        window: The step.
        machine: Validates it.
        values: What is validated of each pass.
        own_gradient: Measures gradients; None if no rank has one of its own.
        measure_parameters: Returns what is validated of the parameters that a step begins with.

    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        window: StepWindow,
        machine: RerunStateMachine,
        values: StepValidation,
        own_gradient: OwnGradient | None,
        measure_parameters: Callable[[], list[Measured]],
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._window = window
        self._machine = machine
        self._values = values
        self._own_gradient = own_gradient
        self._measure_parameters = measure_parameters
        self.blamed: dict[int, int] = {}
        """The slots that compute wrongly, with their ranks, as of the last time that somebody asked."""

    def __call__(self, findings: Sequence[Finding]) -> Mapping[int, RerunDiagnostic] | None:
        """Collective. Return what the values of each rank turned out to be; None if there is nobody to ask."""
        self.blamed = {}
        if self._is_sharded and not is_elastic(self._trainer):
            return None  # there is one replica
        standing = gather_by_slot(self._trainer, (self._trainer.global_rank, self._window.can_be_replayed))
        ranks = {slot: rank for slot, (rank, _) in standing.items()}
        slots = {rank: slot for slot, rank in ranks.items()}
        if not all(can_be_replayed for _, can_be_replayed in standing.values()):
            return None
        while True:
            packed = gather_by_slot(self._trainer, (shard_of(self._trainer), replica_of(self._trainer), self._pack()))
            places = {slot: (shard, replica) for slot, (shard, replica, _) in packed.items()}
            passes = {slot: passes for slot, (_, _, passes) in packed.items()}
            if len({replica for _, replica in places.values()}) < 2 or None in passes.values():
                return None
            heard = self._ask(findings, slots, judged_by(places), passes)
            verdicts = judge(findings, slots, heard)
            if verdicts is not None:
                break  # else somebody died, and those who are left ask each other
        self.blamed = {slot: ranks[slot] for slot in verdicts.blamed} if heard.keys() - set(verdicts.blamed) else {}
        return verdicts.of_rank

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self._pl_module.parameters())

    def slots_of(self, ranks: Iterable[int]) -> dict[int, int]:
        """Collective. Return the slots of ``ranks``, with their ranks; none if that is everybody."""
        live, asked = gather_by_slot(self._trainer, self._trainer.global_rank), set(ranks)
        slots = {slot: rank for slot, rank in live.items() if rank in asked}
        return slots if len(slots) < len(live) else {}

    def _ask(
        self, findings: Sequence[Finding], slots: Mapping[int, int], judged: Mapping[int, int], packed: Mapping[int, Any]
    ) -> dict[int, Heard]:
        """Collective. Run the batches of the slot that this one judges; return what everybody says, by slot."""
        slot = slot_of(self._trainer)
        of = judged[slot]
        with self._aside():
            own_norm, _ = self._run(pickle.loads(packed[slot]))
            norm, passes = self._run(pickle.loads(packed[of]))
        same = {}
        for index, finding in enumerate(findings):
            again = passes.newest(finding.call)
            if not finding.shared and slots.get(finding.rank) == of and again is not None:
                same[index] = bool(again.compare(finding.value, again.result) <= again.tolerance)
        return gather_by_slot(self._trainer, Heard(of, same, norm, own_norm))

    def _pack(self) -> bytes | None:
        """Return this rank's passes; None if its batches can't be sent."""
        cpu = torch.device("cpu")
        passes = [
            {
                "batch": move_data_to_device(micro_batch.batch, cpu),
                "batch_idx": micro_batch.arguments.get("batch_idx"),
                "random": micro_batch.begin.random,
                "is_own": micro_batch.is_own,
            }
            for micro_batch in self._window.micro_batches
        ]
        try:
            return pickle.dumps(passes)
        except Exception as error:  # of whatever type the user's own objects raise
            log.warning("The batch can't be sent to another rank (%s), which could have told whether it is to blame.", error)
            return None

    def _run(self, passes: Sequence[Mapping[str, Any]]) -> tuple[float, Passes]:
        """Collective. Run passes from the state before the step; return the norm of their gradient and their values."""
        for parameter in self._pl_module.parameters():
            parameter.grad = None
        self._window.micro_batches[0].begin.restore()
        own, losses = self._window.micro_batches, list[tuple[int, Tensor]]()
        with self._machine.apart() as validated:
            for place, (here, there) in enumerate(zip(own, passes, strict=False)):
                batch = move_data_to_device(there["batch"], self._trainer.strategy.root_device)
                arguments = OrderedDict(here.arguments)
                if "batch_idx" in arguments:
                    arguments["batch_idx"] = there["batch_idx"]
                foreign = MicroBatch(batch, arguments, here.begin, is_inner=True, is_own=there["is_own"], seen=batch)
                _set_rng_states(there["random"])
                with nullcontext() if self._own_gradient is None else self._own_gradient.measured():  # the last one counts
                    # Shards have their gradient with the last pass; other gradients would be averaged with it.
                    self._window.run_apart(foreign, is_last=self._is_sharded and place == len(passes) - 1)
                if foreign.is_own and foreign.loss is not None:
                    losses.append((place, foreign.loss))
            scaler = getattr(self._trainer.precision_plugin, "scaler", None)
            scale = None if scaler is None else float(scaler.get_scale())
            norm = gradient_norm(self._pl_module.parameters())
            is_own = bool(passes) and passes[-1]["is_own"]
            own_norm = self._own_gradient.norm if is_own and self._own_gradient is not None else None
            values = copy(self._values)  # which keeps the newest ones
            values.validate(self._machine, [*self._measure_parameters(), *measure(losses, None, own_norm, scale)])
        return math.nan if norm is None else float(norm) / (scale or 1.0), validated

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Undo afterwards what passes change: they are nobody's."""
        strategy: Any = self._trainer.strategy
        before = StepState(self._trainer, self._pl_module)
        gradients = [(parameter, parameter.grad) for parameter in self._pl_module.parameters()]
        try:
            if hasattr(strategy, "aside"):
                with strategy.aside():
                    yield
            else:
                with _flag_kept(strategy.model, "require_forward_param_sync"):
                    yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            before.restore()


def judged_by(places: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return for each slot the one whose batches it runs: of the replica before, where it holds the same shard.

    Args:
        places: For each slot, which shard of which replica it holds.

    """
    judged: dict[int, int] = {}
    for shard in {shard for shard, _ in places.values()}:
        cycle = sorted((replica, slot) for slot, (held, replica) in places.items() if held == shard)
        judged |= {slot: cycle[index - 1][1] for index, (_, slot) in enumerate(cycle)}
    return judged


@dataclass(frozen=True)
class Verdicts:
    """What comes of it.

    Args:
        of_rank: What the values of a rank are.
        blamed: The slots that compute wrongly.

    """

    of_rank: dict[int, RerunDiagnostic]
    blamed: tuple[int, ...]


def judge(findings: Sequence[Finding], slots: Mapping[int, int], heard: Mapping[int, Heard]) -> Verdicts | None:
    """Return what others say about findings; None if the one who was to say so is gone, while its slot is there.

    Args:
        findings: Of all ranks.
        slots: The slots of those ranks.
        heard: What each slot that is left says.

    """
    by_subject = {row.of: row for row in heard.values()}
    of_rank: dict[int, RerunDiagnostic] = {}
    blamed: set[int] = set()
    for index, finding in enumerate(findings):
        slot = slots[finding.rank]
        if finding.shared:
            gone = set(slots.values()) - heard.keys()
            wrong = _miscalculating(heard) or gone  # whose gradient is in the average, and can't be judged any more
        elif slot not in heard:
            wrong = {slot}  # it is gone, with what it computed
        elif slot not in by_subject or index not in by_subject[slot].same:
            if by_subject.keys() != heard.keys():
                return None
            wrong = {slot}  # elsewhere the step did not come to that validation
        else:
            wrong = set() if by_subject[slot].same[index] else {slot}
        blamed |= wrong
        # Of several values of a rank the worst counts.
        if wrong or finding.rank not in of_rank:
            of_rank[finding.rank] = _PERSISTENT if wrong else _CORRECT
    return Verdicts(of_rank, tuple(sorted(blamed)))


def _miscalculating(heard: Mapping[int, Heard], tolerance: float = 1e-3) -> set[int]:
    """Return the slots whose own gradient, or another's, comes out otherwise than elsewhere, and is the worse of the two."""
    wrong = set()
    for slot, row in heard.items():
        if row.of in heard:
            own = heard[row.of].own_norm
            if not _are_close(own, row.norm, tolerance):
                wrong.add(row.of if _badness(own) > _badness(row.norm) else slot)
    return wrong


def _badness(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf


def _are_close(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def with_culprits(findings: Sequence[Finding], blamed: Mapping[int, int]) -> list[Finding]:
    """Return findings of which an average names those whose gradients spoiled it, in place of whoever told of it."""
    told: list[Finding] = []
    for finding in findings:
        if finding.shared and finding.diagnostic == _PERSISTENT and blamed:
            told += [replace(finding, rank=rank) for rank in sorted(blamed.values())]
        else:
            told.append(finding)
    return told


@contextmanager
def _flag_kept(module: Any, name: str) -> Iterator[None]:
    flag = getattr(module, name, None)
    try:
        yield
    finally:
        if flag is not None:
            setattr(module, name, flag)
