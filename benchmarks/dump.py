"""What TensorDump costs a step of a GPT of 10M parameters: idle, and while all linear layers' outputs are dumped.

In one training, blocks of steps with and without it alternate, since the machine's speed drifts; a ratio is the median over
neighbouring blocks. What is dumped in a block is written when the block's time ends.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks import TensorDump
from lightning_ft.dump.reader import find_attempts

_VOCABULARY, _WIDTH, _LAYERS, _HEADS = 256, 384, 6, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.project = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class GPT(LightningModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(length, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(_LAYERS)), nn.LayerNorm(_WIDTH))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        places = torch.arange(tokens.shape[1] - 1)
        logits = self.head(self.blocks(self.tokens(tokens[:, :-1]) + self.places(places)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Blocks(Callback):
    """Takes the dump out of the trainer and puts it in again, and notes how long each block of steps took.

    Args:
        dump: What is measured.
        num_steps: Steps of a block.

    """

    def __init__(self, dump: TensorDump, num_steps: int) -> None:
        self.dump = dump
        self.num_steps = num_steps
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.is_in = True
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % self.num_steps:
            return
        self.dump.wait()
        now = time.perf_counter()
        self.seconds[self.is_in].append(now - self.began)
        self.is_in = not self.is_in
        self._put(trainer, is_in=self.is_in)
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put(trainer, is_in=True)

    def _put(self, trainer: Trainer, *, is_in: bool) -> None:
        others = [callback for callback in trainer.callbacks if callback is not self.dump]
        trainer.callbacks = [*others, *([self.dump] if is_in else [])]  # another list: the old one is being iterated over

    def ratio(self) -> float:
        """Of a block with it to the ones before and after."""
        present, absent = self.seconds[True][1:], self.seconds[False]  # the first block warms up
        return statistics.median(
            2 * each / (before + after) for each, before, after in zip(present, absent, absent[1:], strict=False)
        )


def measure(
    config: dict[str, Any], options: argparse.Namespace, directory: str, *, rounds: int, block: int
) -> tuple[Blocks, float]:
    """Return the blocks of a training with this config, and the bytes that were dumped."""
    seed_everything(1, verbose=False)
    dump = TensorDump(directory, config=config)
    blocks = Blocks(dump, block)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=block * (2 * rounds + 4),  # an even number of blocks: it is in the trainer at the end
        callbacks=[blocks, dump],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(_VOCABULARY, (4096, options.length + 1))
    trainer.fit(GPT(options.length), DataLoader(TensorDataset(tokens), batch_size=options.batch_size))
    size = 0.0
    if config["enable"] and not config.get("rollouts"):
        for found in find_attempts(directory):
            found.verify()
            size += sum(marker.tensors_size for marker in found.markers if marker is not None)
    return blocks, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="Pairs of blocks while dumping.")
    parser.add_argument("--idle-rounds", type=int, default=60, help="Pairs of single steps while idle.")
    parser.add_argument("--block", type=int, default=4, help="Steps of a block.")
    parser.add_argument("--length", type=int, default=128, help="Tokens of a sequence.")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=64 * 2**20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    base = {"enable": True, "filter": ["output:*@Linear"], "max_bytes": options.max_bytes}
    with tempfile.TemporaryDirectory() as directory:
        nothing = {**base, "rollouts": [10**9]}
        idle, _ = measure(nothing, options, str(Path(directory, "idle")), rounds=options.idle_rounds, block=1)
        place = str(Path(directory, "dumping"))
        dumping, size = measure(base, options, place, rounds=options.rounds, block=options.block)
    num_steps = options.block * len(dumping.seconds[True])
    result = {
        "ratio_idle": round(idle.ratio(), 4),
        "ratio_dumping": round(dumping.ratio(), 4),
        "step_ms": round(1e3 * statistics.median(idle.seconds[False]), 1),
        "mb_per_step": round(size / num_steps / 1e6, 1),
        "peak_bytes": dumping.dump.peak_bytes,
        "max_bytes": options.max_bytes,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
