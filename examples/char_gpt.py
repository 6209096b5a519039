"""Train a small character-level GPT on the Python standard library's own source, and lose two ranks on the way.

    python examples/char_gpt.py

Three ranks on the CPU. One of them is killed (SIGKILL) between its gradients and the update, comes back and joins; then
rank 0 is killed, leadership moves, and it comes back too. The module below is a plain LightningModule: nothing in it knows
of faults. The last line says what was lost; the exit code is 0 only if that is nothing.
"""

import argparse
import hashlib
import logging
import math
import statistics
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ft import FTStrategy
from lightning_ft.events.audit import Audit, audit
from lightning_ft.events.log import read_events
from lightning_ft.testing import Fault, FaultPlan


class Block(nn.Module):
    """A transformer block: causal self-attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm_2(x))


class CharGPT(LightningModule):
    """A character-level GPT.

    Args:
        num_characters: Size of the vocabulary.
        length: Characters of context.
        width: Width of the residual stream.
        depth: Number of blocks.
        learning_rate: Peak of the warm-up, after which a cosine goes down to a tenth.

    """

    def __init__(
        self, num_characters: int, length: int = 48, width: int = 64, depth: int = 2, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(num_characters, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        total = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, total // 20)

        def scale(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = min(1.0, (step - warm_up) / max(1, total - warm_up))
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Chunks(Dataset[Tensor]):
    """A text cut into pieces of equal length, each with the first character of the next one."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index * self.length : (index + 1) * self.length + 1]


class PythonSource(LightningDataModule):
    """The source of the Python standard library, as text.

    Args:
        num_chunks: How many pieces to train on; a tenth as many validate.
        length: Characters of a piece.
        batch_size: Pieces of a batch.

    """

    def __init__(self, num_chunks: int, length: int = 48, batch_size: int = 8) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size
        num_characters = (num_chunks + num_chunks // 10) * length + 2
        text = ""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += "".join(c for c in path.read_text(errors="ignore") if c.isascii())
            if len(text) >= num_characters:
                break
        text = text[:num_characters]
        self.characters = sorted(set(text))
        self.num_characters = len(self.characters)
        index = {character: i for i, character in enumerate(self.characters)}
        tokens = torch.tensor([index[character] for character in text])
        cut = num_chunks * length + 1
        self.train, self.validation = Chunks(tokens[:cut], length), Chunks(tokens[cut:], length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=4 * self.batch_size)


class Timeline(Callback):
    """Prints a row now and then, and around every change of the number of replicas; compares the ranks at the end."""

    def __init__(self, every_n_steps: int = 25) -> None:
        self.every_n_steps = every_n_steps
        self.durations: list[float] = []
        self.previous: tuple[float, int] | None = None
        self.identical = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"{'step':>6} {'replicas':>9} {'stall ms':>9} {'loss':>7}", flush=True)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        now, replicas = time.perf_counter(), trainer.world_size
        loss, step = float(trainer.callback_metrics["train_loss"]), trainer.global_step
        stall = 0.0
        changed = False
        if self.previous is not None:
            changed = replicas != self.previous[1]
            self.durations.append(now - self.previous[0])
            stall = max(0.0, self.durations[-1] - statistics.median(self.durations))
        self.previous = (now, replicas)
        if trainer.is_global_zero and (changed or step % self.every_n_steps == 0):
            note = "  <- a rank died; this step was not lost" if changed and replicas < 3 else ""
            note = "  <- it is back" if changed and replicas == 3 else note
            shown = f"{1e3 * stall:9.0f}" if changed else f"{'':9}"
            print(f"{step:6d} {replicas:7d}/3 {shown} {loss:7.3f}{note}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.previous = None  # a validation is no stall

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        digest = hashlib.sha256()
        for tensor in pl_module.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        mine = torch.tensor(int.from_bytes(digest.digest()[:7], "big"))
        self.identical = len(set(trainer.strategy.all_gather(mine).tolist())) == 1


def summary(record: Audit, identical: bool) -> tuple[str, bool]:
    """Return the last line, and whether everything was as promised."""
    twice = sum(len(epoch.twice) for epoch in record.epochs.values())
    never = sum(len(epoch.never) for epoch in record.epochs.values())
    stalls = ", ".join(f"{1e3 * death.stall:.0f}" for death in record.deaths if death.stall is not None)
    text = (
        f"deaths {len(record.deaths)} (stalls: {stalls} ms), rejoined {len(record.joins)},"
        f" steps lost {len(record.steps_lost)}, batches trained twice {twice}, never {never},"
        f" weights of all ranks bit-identical: {'yes' if identical else 'NO'}"
    )
    good = identical and len(record.deaths) == len(record.joins) == 2 and not record.problems()
    return text, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=7200, help="pieces of text in an epoch")
    parser.add_argument("--no-faults", action="store_true", help="nobody dies")
    options = parser.parse_args()

    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    data = PythonSource(options.chunks)
    steps = options.epochs * -(-options.chunks // (3 * data.batch_size))
    faults = [
        Fault(kind="kill", slot=2, point="gradients_ready", step=steps // 4),
        Fault(kind="kill", slot=0, point="gradients_ready", step=6 * steps // 10),
    ]
    timeline = Timeline()
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=FTStrategy(),
        max_epochs=options.epochs,
        logger=CSVLogger("outputs", name="char_gpt", flush_logs_every_n_steps=10),
        callbacks=[
            timeline,
            ModelCheckpoint(monitor="val_loss", save_last=True),
            LearningRateMonitor("step"),
            *([] if options.no_faults else [FaultPlan(faults)]),
        ],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CharGPT(data.num_characters), datamodule=data)
    if trainer.is_global_zero:
        record = audit(read_events(trainer.strategy.event_directory))
        text, good = summary(record, timeline.identical)
        print(f"val_loss {float(trainer.callback_metrics['val_loss']):.3f} after {trainer.global_step} steps")
        print(text, flush=True)
        if not good and not options.no_faults:
            sys.exit(1)


if __name__ == "__main__":
    main()
