"""A checkpoint callback that saves directories at once, from rank 0."""

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer

from lightning_ft.callbacks.resumable_checkpoint import ResumableCheckpoint
from lightning_ft.checkpoint.layout import MANIFEST, META, FileEntry, Manifest, rank_section_name, staging_name
from lightning_ft.checkpoint.leftovers import discard
from lightning_ft.checkpoint.lightning_dict import split
from lightning_ft.checkpoint.rank_section import section_bytes
from lightning_ft.checkpoint.verify import checksum


def save_directory(
    path: Path,
    checkpoint: dict[str, Any],
    names: Sequence[Sequence[str] | None],
    *,
    run_id: str = "run",
    replaces: tuple[str, ...] = (),
) -> None:
    tensors, meta = split(checkpoint, names)
    staging = path.with_name(staging_name(path.name, "0"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(tensors, checkpoint_id=staging, no_dist=True)
    torch.save(meta, staging / META)
    section = {"rank": 0, "world_size": 1, "state": {"random": torch.get_rng_state(), "position": (1, b"x")}}
    (staging / rank_section_name(0)).write_bytes(section_bytes(section))
    files = tuple(FileEntry(file.name, file.stat().st_size, checksum(file)) for file in sorted(staging.iterdir()))
    step, epoch = checkpoint["global_step"], checkpoint["epoch"]
    manifest = Manifest(step, epoch, run_id, 1, 1, files, created=time.time(), replaces=replaces)
    (staging / MANIFEST).write_bytes(manifest.to_bytes())
    if path.exists():
        discard(path)
    os.rename(staging, path)


class Directories(ResumableCheckpoint):
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        if trainer.is_global_zero:
            named = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
            groups = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in trainer.optimizers]
            names = [[named[id(parameter)] for parameter in parameters] for parameters in groups]
            save_directory(Path(filepath), checkpoint, names, replaces=self.replaced)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        trainer.strategy.barrier()

    replaced: tuple[str, ...] = ()
