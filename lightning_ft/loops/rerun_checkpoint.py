"""The checkpoint from which another job begins with the step that was rejected, and tells on another device what it was."""

import logging
import os
from collections.abc import Mapping

from lightning.pytorch import Trainer

from lightning_ft.loops.window import StepWindow
from lightning_ft.rerun.batches import digest
from lightning_ft.rerun.ranks import Ranks

log = logging.getLogger(__name__)


class RerunCheckpoint:
    """Saves it, and knows after a resumption whether a step is the one that was rejected.

    Args:
        digests: Checksums of the rejected step's batches, by rank, of the checkpoint that was resumed from.

    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = dict(digests)

    def state_dict(self) -> dict[str, str]:
        """Return the checksums, for the checkpoint."""
        return dict(self._digests)

    def is_same_step(self, ranks: Ranks, window: StepWindow) -> bool:
        """Collective. Whether the step has the batches of the rejected one on all ranks: the loader may be elsewhere."""
        return not ranks.any(self._digests.get(str(ranks.rank)) != _digest(window))

    def save(self, trainer: Trainer, ranks: Ranks, window: StepWindow) -> None:
        """Collective. Save a checkpoint from which another job runs this step first."""
        self._digests = dict(ranks.gather((str(ranks.rank), _digest(window))))
        window.go_back()
        directory = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(directory, f"rerun-step={trainer.global_step}.ckpt")
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            log.warning(
                "Saved %s: resume from it on another device, to tell whether this one or the data is to blame.", path
            )


def _digest(window: StepWindow) -> str:
    return digest([micro_batch.batch for micro_batch in window.micro_batches])
