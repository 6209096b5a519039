"""A training that sends signals to itself: options as JSON in the first argument, results as files in the directory."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import FTStrategy, SupervisionOptions
from lightning_ft.testing import FaultPlan, fingerprint

warnings.filterwarnings("ignore")

SLOT = os.environ.get("LIGHTNING_FT_SLOT", "0")


@dataclass
class Options:
    signal: str | None = None
    to: str = "supervisor"  # or "rank", or "all": every process of the job, loaders' workers too
    point: str = "on_train_batch_start"
    step: int = 5
    times: int = 1
    last: bool = False
    """Whether the signal comes when the others are through with their predictions."""
    calls: tuple[str, ...] = ("fit",)
    devices: int = 3
    min_replicas: int = 1
    max_restarts: int = 3
    grace: float = 40.0
    num_samples: int = 480
    max_epochs: int = -1
    max_steps: int = -1
    accumulate: int = 1
    num_workers: int = 0
    validation: bool = False
    val_check_interval: float = 1.0
    num_validation_samples: int = 48
    manual: bool = False
    checkpoint: dict[str, Any] | None = None
    version: int | None = None
    ckpt_path: str | None = "last"
    handler: bool = False
    second_life: str | None = None
    """Signal to the supervisor from a process that was started again, before it does anything else."""


class Module(LightningModule):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.automatic_optimization = not options.manual
        self.layer = torch.nn.Linear(4, 1)
        self.point = lambda name: None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean(), on_step=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sender(Callback):
    """Sends the signal from the second rank, when it comes to the point in the step or later."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.sent = options.signal is None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hook = self.options.point
        original = getattr(Callback, hook)

        def send_then_go_on(trainer: Trainer, *args: Any) -> None:
            self.send(trainer)
            original(self, trainer, *args)

        setattr(self, hook, send_then_go_on)

    def send(self, trainer: Trainer) -> None:
        options = self.options
        if self.sent or trainer.sanity_checking or trainer.global_step < options.step or trainer.global_rank != 1:
            return
        self.sent = True
        deadline = time.monotonic() + 60.0
        while options.last and not Path("predicted_0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pids = {"supervisor": [os.getppid()], "rank": [os.getpid()]}.get(options.to)
        if pids is None:
            pids = with_descendants(os.getppid())
        assert options.signal is not None
        # From outside, as a cluster manager does: what a rank sends to its own workers means something else.
        command = ["kill", f"-{options.signal.removeprefix('SIG')}", *map(str, pids)]
        arrived = note_arrival(getattr(signal, options.signal))
        for _ in range(options.times):
            subprocess.run(command, check=options.to != "all")
            time.sleep(0.02)
        assert arrived.wait(120.0)  # it may take the supervisor more than a step to pass it on

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            with open(f"validated_{SLOT}", "a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"predicted_{SLOT}").touch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        Path(f"exception_{SLOT}").write_text(f"{type(exception).__name__} {trainer.global_step}")


def note_arrival(number: int) -> threading.Event:
    """Return what is set once this process received the signal, unless that ends it."""
    arrived, handle = threading.Event(), signal.getsignal(number)
    if not callable(handle):
        arrived.set()
        return arrived

    def note(signum: int, frame: Any) -> None:
        arrived.set()
        handle(signum, frame)

    signal.signal(number, note)
    return arrived


def with_descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [pid, *(found for child in children for found in with_descendants(child))]


def main(options: Options) -> None:
    if options.second_life and os.environ["LIGHTNING_FT_INCARNATION"] == "1":
        pid = os.getppid() if options.to == "supervisor" else int(Path("pid_1").read_text())
        os.kill(pid, getattr(signal, options.second_life))
        signal.pause()  # until it is passed on
    Path(f"pid_{SLOT}").write_text(str(os.getpid()))
    seed_everything(7, verbose=False)
    if options.handler:

        def handle(signum: int, frame: Any) -> None:
            with open(f"handled_{SLOT}", "a") as file:
                file.write(f"{signum}\n")

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGUSR1, handle)
    checkpoint = [] if options.checkpoint is None else [ModelCheckpoint(**options.checkpoint)]
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=FTStrategy(
            min_replicas=options.min_replicas,
            max_restarts=options.max_restarts,
            supervision=SupervisionOptions(grace=options.grace),
            timeout=60,
        ),
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=options.val_check_interval,
        logger=CSVLogger(".", version=options.version),
        log_every_n_steps=1,
        callbacks=[FaultPlan.from_environ(), Sender(options), *checkpoint],
        enable_checkpointing=options.checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Module(options)
    data = DataLoader(
        TensorDataset(torch.randn(options.num_samples, 4)), batch_size=4, shuffle=True, num_workers=options.num_workers
    )
    validation = DataLoader(TensorDataset(torch.randn(options.num_validation_samples, 4)), batch_size=4)
    for call in options.calls:
        if call == "fit":
            trainer.fit(model, data, validation if options.validation else None, ckpt_path=options.ckpt_path)
            Path(f"result_{SLOT}.json").write_text(json.dumps(fingerprint(trainer)))
        else:
            getattr(trainer, call)(model, validation)
    if options.handler:
        assert signal.getsignal(signal.SIGTERM) is handle
    Path(f"completed_{SLOT}").touch()


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
