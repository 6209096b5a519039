"""The ranks of a trainer, as those who decide together."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer


class TrainerRanks:
    """Agree through the trainer's strategy, in which ranks may come and go.

    Args:
        trainer: The trainer.

    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def rank(self) -> int:
        """Which of them this process is."""
        return self._trainer.global_rank

    def any(self, decision: bool) -> bool:
        """Collective. Whether any of them says yes."""
        if self._trainer.world_size == 1:
            return decision
        return self._trainer.strategy.reduce_boolean_decision(decision, all=False)

    def gather(self, value: Any) -> list[Any]:
        """Collective. Return the values of all of them, by rank."""
        strategy: Any = self._trainer.strategy
        if self._trainer.world_size == 1:
            return [value]
        if hasattr(strategy, "gather_objects"):
            gathered = strategy.gather_objects(value)
            return [value] if gathered is None else list(gathered)
        values: list[Any] = [None] * self._trainer.world_size
        dist.all_gather_object(values, value)
        return values
