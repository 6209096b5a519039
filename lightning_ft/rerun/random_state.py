"""The random number generators that a step draws from, those of CUDA devices included."""

from typing import Any

import torch

from lightning_ft.data import random_state as of_cpu


def random_state() -> dict[str, Any]:
    """Return the state of all generators, as plain data."""
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"cpu": of_cpu.random_state(), "cuda": torch.cuda.get_rng_state_all() if has_cuda else []}


def set_random_state(state: dict[str, Any]) -> None:
    """Draw from ``state``, which :func:`random_state` returned, from now on; devices that are not there are left out."""
    of_cpu.set_random_state(state["cpu"])
    if state["cuda"]:
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
