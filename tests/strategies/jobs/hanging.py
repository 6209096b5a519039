"""A training in which something blocks once: a lock, a dataset, a loader's worker, or storage for most ranks."""

import os
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy

warnings.filterwarnings("ignore")

WHERE = sys.argv[1]
SLOT = int(os.environ.get("LIGHTNING_FT_SLOT", 0))
LATER = 16  # the fifth batch: before the first step, any delay is set-up


def is_first() -> bool:
    try:
        os.close(os.open("blocked", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def has_been_told() -> bool:
    return any('"stall"' in path.read_text() for path in Path().glob("**/ft_events/*/supervisor.jsonl"))


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        if WHERE in ("dataset", "worker") and self.num_read > LATER and is_first():
            threading.Event().wait()
        while WHERE == "storage" and SLOT > 0 and self.num_read > LATER and not has_been_told():
            time.sleep(0.05)  # what a file system does that stalls
        return torch.ones(4) * index


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if WHERE == "lock" and SLOT == 1 and self.global_step == 3 and is_first():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=FTStrategy(timeout=2.0, min_replicas=3),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Samples(), batch_size=4, num_workers=int(WHERE == "worker")))
