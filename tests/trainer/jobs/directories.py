"""Saves a checkpoint's directory at once, from one process, by torch's own writer."""

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

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
