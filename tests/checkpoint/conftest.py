"""A checkpoint as the product lays it out, saved by one process with torch's own writer."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer" / "jobs"))  # where the jobs save as the tests here do

from directories import save_directory


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
        path = tmp_path / name
        save_directory(path, {**checkpoint, "global_step": step}, NAMES, run_id=run_id, replaces=replaces)
        return path

    return run
