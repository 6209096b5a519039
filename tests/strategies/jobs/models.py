"""Modules and callbacks that ``train.py`` runs when its options name them: what is odd about each is in its docstring."""

from typing import Any

import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from train import Model


class Contrastive(Model):
    """A collective inside backward, in every step."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.encoder, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        encoded = nn.functional.normalize(self.encoder(inputs))
        others = self.all_gather(encoded, sync_grads=True).flatten(0, 1)
        loss = (encoded @ others.T).logsumexp(1).mean() + nn.functional.mse_loss(self.head(encoded), targets)
        self.log("similarity", loss, sync_dist=True)
        return loss + super().training_step(batch, batch_idx)


class LateSum(Model):
    """A collective inside backward that no step before the fourth has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step < 3:
            return loss
        (middle,) = dist_nn.all_reduce(self.net[0](batch[0]).mean(0, keepdim=True))
        return loss + middle.square().mean()
