"""ReplicaChecksums: finds a rank whose memory is not what the others hold, and gives it what they have."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ft.elastic.checks import check_choice, check_count
from lightning_ft.errors import CorruptedStateError
from lightning_ft.rerun.replica_state import NUMBERS, Vote, combined, differing, digests, named_state, vote
from lightning_ft.trainer.slots import exclude, gather_by_slot, is_elastic, send_tensor, shard_of, slot_of

log = logging.getLogger(__name__)

_TOLD = {
    "heal": "Now they get what the others hold",
    "exclude": "Now they are excluded and started again",
    "warn": "Training goes on as it is",
}

Parts = Mapping[int, tuple[int, dict[str, int]]]
"""For each slot: which shard it holds, and a number for each thing in it."""


class ReplicaChecksums(Callback):
    """Compare what the ranks hold, and act on one that is outvoted.

    After a step all replicas have bit-identical parameters and optimizer state; memory that flips a bit, or a device that
    computes wrongly now and then, changes that without a word, and every later average is wrong. Every few steps each rank
    takes checksums of what it holds, before checkpoints are saved, and all compare them. If more than half agree, the
    others are wrong: that is told, with the names of what differs, and they get the right values. A slot whose process was
    wrong before is not trusted a third time: under FTStrategy it is excluded, and started again.

    What was averaged between the fault and the check stays; the fewer steps between checks, the less that is. With
    two replicas that differ nobody can tell which is right, and training stops. Works under FTStrategy, also with
    sharded replicas, and under ``ddp``; on one device there is nothing to compare.

    Args:
        every_n_train_steps: Optimizer steps between two checks. There is one after the last step, too.
        on_mismatch: ``"heal"``: those that are outvoted get what the others hold, of what differs. ``"exclude"``: they are
            removed and started again, only under FTStrategy. ``"stop"``: training ends with an error.
            ``"warn"``: it goes on as it is.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is not valid.

    Example::

        Trainer(devices=4, strategy=FTStrategy(), callbacks=[ReplicaChecksums(every_n_train_steps=50)])

    """

    def __init__(
        self,
        every_n_train_steps: int = 100,
        *,
        on_mismatch: Literal["heal", "exclude", "stop", "warn"] = "heal",
    ) -> None:
        check_count("ReplicaChecksums", "every_n_train_steps", every_n_train_steps, least=1)
        check_choice("ReplicaChecksums", "on_mismatch", on_mismatch, ("heal", "exclude", "stop", "warn"))
        self.every_n_train_steps = every_n_train_steps
        self.on_mismatch = on_mismatch
        self.agreed_step: int | None = None
        """The newest step after which all ranks were seen to hold the same."""
        self._checked_step = 0
        self._healed: list[int] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        name, strategy = type(self).__name__, trainer.strategy
        if trainer.num_devices * trainer.num_nodes == 1:
            rank_zero_warn(f"`{name}` has nothing to compare on one device.")
        elif not is_elastic(trainer) and not isinstance(strategy, DDPStrategy):
            raise MisconfigurationException(
                f"`{name}` compares replicas, and `{type(strategy).__name__}` has none that it knows of: expected FTStrategy"
                " or `ddp`."
            )
        if self.on_mismatch == "exclude" and not is_elastic(trainer):
            raise MisconfigurationException(
                f'`{name}(on_mismatch="exclude")` needs FTStrategy: elsewhere no rank can leave. Expected "heal", "stop" or'
                ' "warn".'
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step < self._checked_step:  # another fit
            self._checked_step, self.agreed_step = 0, None
        if step // self.every_n_train_steps != self._checked_step // self.every_n_train_steps:
            self._check(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._checked_step:
            self._check(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"checked_step": self._checked_step, "agreed_step": self.agreed_step, "healed": list(self._healed)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._checked_step = state_dict["checked_step"]
        self.agreed_step = state_dict["agreed_step"]
        self._healed = list(state_dict["healed"])

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Compare, and act if ranks differ."""
        self._checked_step = trainer.global_step
        tensors, numbers = named_state(pl_module, trainer.optimizers)
        mine = digests(tensors, numbers)
        rows = gather_by_slot(trainer, (shard_of(trainer), combined(mine)))
        if vote(rows).is_unanimous:
            self.agreed_step = trainer.global_step
            return
        # Once more, and each by name: somebody may have died since.
        parts = gather_by_slot(trainer, (shard_of(trainer), mine))
        verdict = vote({slot: (shard, combined(held)) for slot, (shard, held) in parts.items()})
        if not verdict.is_unanimous:
            self._act(trainer, tensors, parts, verdict)

    def _act(self, trainer: Trainer, tensors: Mapping[str, Tensor], parts: Parts, verdict: Vote) -> None:
        names = _what_differs(parts, verdict)
        action = self._action(trainer, verdict, parts, names)
        error = CorruptedStateError(trainer.global_step, names, not verdict.undecided, self.agreed_step)
        _record(trainer, names, action)
        if action == "stop":
            raise error
        if trainer.is_global_zero:
            since = "before" if self.agreed_step is None else f"since step {self.agreed_step}"
            log.warning("%s %s; what was trained %s may have traces of it.", error.finding, _TOLD[action], since)
        if action == "exclude":
            self._healed = [slot for slot in self._healed if slot not in verdict.wrong]
            exclude(trainer, verdict.wrong, f"its state differed from the others' after step {trainer.global_step}")
        elif action == "heal":
            self._healed += verdict.wrong
            self._heal(trainer, tensors, parts, verdict)

    def _action(
        self, trainer: Trainer, verdict: Vote, parts: Parts, names: Mapping[int, Sequence[str]]
    ) -> Literal["heal", "exclude", "stop", "warn"]:
        if self.on_mismatch == "warn":
            return "warn"
        if verdict.undecided:
            return "stop"
        if self.on_mismatch != "heal":
            return self.on_mismatch
        # What a rank lacks altogether, or holds as a number of Python, is not copied over.
        known = set.intersection(*(set(held) for _, held in parts.values())) - {NUMBERS}
        is_memory = all(known.issuperset(of_slot) for of_slot in names.values())
        if not is_memory or (is_elastic(trainer) and set(verdict.wrong) & set(self._healed)):
            return "exclude" if is_elastic(trainer) else "stop"
        return "heal"

    @torch.no_grad()
    def _heal(self, trainer: Trainer, tensors: Mapping[str, Tensor], parts: Parts, verdict: Vote) -> None:
        """Collective. Give those that are outvoted what the others hold."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, "wait_for_copy", lambda: None)()  # a save may still read what is about to change
        slot, shard = slot_of(trainer), shard_of(trainer)
        for damaged in sorted({parts[wrong][0] for wrong in verdict.wrong}):
            sources = list(verdict.right[damaged])
            wrong = [one for one in verdict.wrong if parts[one][0] == damaged]
            differs = {name for one in wrong for name in differing(parts[one][1], parts[sources[0]][1])}
            for name in sorted(differs):
                mine = tensors[name] if shard == damaged else None
                if not send_tensor(trainer, mine, sources, overwrite=slot in wrong):
                    raise CorruptedStateError(trainer.global_step, {one: [name] for one in wrong}, False, self.agreed_step)


def _what_differs(parts: Parts, verdict: Vote) -> dict[int, list[str]]:
    """Return for each slot that is outvoted, or that differs where nobody is, the names of what does."""
    names: dict[int, list[str]] = {}
    for slot in (*verdict.wrong, *verdict.undecided):
        shard, held = parts[slot]
        others = verdict.right.get(shard) or [one for one in verdict.undecided if parts[one][0] == shard]
        of_others = {name: None for one in others for name in differing(held, parts[one][1])}
        names[slot] = list(of_others)
    return names


def _record(trainer: Trainer, names: Mapping[int, Sequence[str]], action: str) -> None:
    events: Any = getattr(trainer.strategy, "events", None)
    if events is not None and trainer.is_global_zero:
        differing = {str(slot): list(of_slot)[:8] for slot, of_slot in names.items()}
        events.emit("corruption", step=trainer.global_step, differing=differing, action=action)
