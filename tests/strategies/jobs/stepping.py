"""Modules whose batches make no, one or several backward passes and optimizer steps; ``train.py`` runs them."""

from typing import Any

import torch
from torch import Tensor, nn
from train import Model


class Manual(Model):
    """The sample module with optimizer steps by hand."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.automatic_optimization = False


class Adversarial(Manual):
    """Two optimizers in turn, the other's parameters switched off; every third batch takes two steps of each."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.judge = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                for _ in range(1 + (batch_idx % 3 == 2)):
                    fake = self.net(batch[0] + torch.randn_like(batch[0]))
                    loss = self.judge(fake).mean() if optimizer is self.optimizers()[0] else self._judgement(batch, fake)
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)

    def _judgement(self, batch: Any, fake: Tensor) -> Tensor:
        return self.judge(batch[1]).square().mean() - self.judge(fake.detach()).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), lr=1e-2), torch.optim.Adam(self.judge.parameters(), lr=1e-2)], []


class Accumulating(Manual):
    """One optimizer step every three batches, and none for the rest of an epoch; every fifth batch has no backward pass.

    The gradient of ``ones`` counts the backward passes since the last step, whatever ranks took part in them.
    """

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.ones = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 3 == 0:
            optimizer.zero_grad()
        if batch_idx % 5 != 4:
            self.manual_backward(super().training_step(batch, batch_idx) + self.ones)
        if batch_idx % 3 == 2:
            expected = sum(index % 5 != 4 for index in range(batch_idx - 2, batch_idx + 1))
            assert abs(self.ones.grad.item() - expected) < 1e-3, f"{self.ones.grad} after {expected} passes"
            optimizer.step()


class LineSearching(Model):
    """Calls the closure as often as the loss demands, several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


class Overflowing(Model):
    """Its loss is infinite on rank 1 in step 3, and on rank 0 in step 8."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale(), prog_bar=True)
        return loss * float("inf") if (self.global_rank, self.global_step) in ((1, 2), (0, 7)) else loss


class OddKinds(Manual):
    """Gradients that are sparse, complex and of two precisions; every fourth batch is accumulated with the next one."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.fine = nn.Linear(4, 4).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        turned = (batch[1] * self.turn).abs() + self.rows(batch[2] % 20) + self.fine(batch[1].double()).float()
        if batch_idx % 4 != 1:
            self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx) + turned.square().mean())
        if batch_idx % 4:
            for optimizer in self.optimizers():
                optimizer.step()

    def configure_optimizers(self) -> Any:
        dense = [parameter for parameter in self.parameters() if parameter is not self.rows.weight]
        return [torch.optim.Adam(dense, lr=1e-2), torch.optim.SparseAdam([self.rows.weight], lr=1e-2)], []


class Idle(Model):
    """Has parameters that only rank 0 uses."""

    def __init__(self, batch_norm: bool, dropout: float) -> None:
        super().__init__(batch_norm, dropout)
        self.idle = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.idle(batch[1]).mean() if self.global_rank == 0 else loss


class Lopsided(Manual):
    """Rank 1 makes a backward pass too many in its fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(1 + (self.global_rank == 1 and batch_idx == 3)):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()
