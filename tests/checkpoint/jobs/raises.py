"""Begins saves and ends with an error before they are there."""

import torch

from lightning_ft.checkpoint import async_save_training_state

module = torch.nn.Linear(1000, 1000)
for step in range(3):
    async_save_training_state(module, None, str(step), step=step)
raise KeyError("mine")
