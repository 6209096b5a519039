"""A checkpoint as the product lays it out, saved by one process with torch's own writer."""

import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_ft.checkpoint.layout import MANIFEST, META, FileEntry, Manifest, rank_section_name, staging_name
from lightning_ft.checkpoint.lightning_dict import split
from lightning_ft.checkpoint.rank_section import section_bytes
from lightning_ft.checkpoint.verify import checksum


@pytest.fixture
def checkpoint() -> dict[str, Any]:
    """What Lightning would save of a small model after a few steps, with a moving average in a callback."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 160), torch.nn.BatchNorm1d(160), torch.nn.Linear(160, 120))
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": others}])
    for _ in range(2):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"Average": {"model": OrderedDict((key, value + 1) for key, value in state.items()), "tag": (1, "a")}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 1}],
        "hyper_parameters": {"width": 160},
    }


NAMES = [["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]]


@pytest.fixture
def save(checkpoint: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Save ``checkpoint`` as ``tmp_path/<name>``."""

    def run(name: str = "step=2.ckpt", *, step: int = 2, run_id: str = "run", replaces: tuple[str, ...] = ()) -> Path:
        tensors, meta = split({**checkpoint, "global_step": step}, NAMES)
        staging = tmp_path / staging_name(name, "0")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(tensors, checkpoint_id=staging, no_dist=True)
        torch.save(meta, staging / META)
        section = {"rank": 0, "world_size": 1, "state": {"random": torch.get_rng_state(), "position": (1, b"x")}}
        (staging / rank_section_name(0)).write_bytes(section_bytes(section))
        files = tuple(FileEntry(path.name, path.stat().st_size, checksum(path)) for path in sorted(staging.iterdir()))
        manifest = Manifest(step, 1, run_id, 1, 1, files, replaces=replaces)
        (staging / MANIFEST).write_bytes(replace(manifest, created=time.time()).to_bytes())
        os.rename(staging, tmp_path / name)
        return tmp_path / name

    return run
