"""How often the baseline takes a value of a faultless training for a spike, and which injected spikes it finds.

    python -m benchmarks.false_alarms --seeds 20 --steps 2000
    python -m benchmarks.false_alarms --seeds 4 --steps 2000 --ranks 3

Real trainings: a classifier that ends up knowing its noisy labels by heart, a character-level GPT, and a classifier with
warm-up and learning rates that drop tenfold; of each the loss of every batch and the norm of the gradient. With ranks, of
which each has a batch of its own in a step: losses and norms of each rank's own gradient, and the norm of the average.
"""

import argparse
import json
import math
import multiprocessing
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ft.rerun.step_values import LOSS, NORM, OWN_NORM, new_baselines

Curve = list[float]
Step = Callable[[int], Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm_2(x))


def _classes(generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a random teacher, one label in twenty wrong."""
    inputs = torch.randn(num_samples, 32, generator=generator)
    teacher = torch.randn(32, 64, generator=generator), torch.randn(64, 10, generator=generator)
    labels = ((inputs @ teacher[0]).tanh() @ teacher[1]).argmax(1)
    wrong = torch.rand(num_samples, generator=generator) < 0.05
    return inputs, torch.where(wrong, torch.randint(10, (num_samples,), generator=generator), labels)


def _batches(num_samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(num_samples, generator=generator).split(batch_size)


def _classifier(generator: torch.Generator, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Step]:
    inputs, labels = _classes(generator, 2000)
    network = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    batches = _batches(len(inputs), 32, generator)

    def loss(step: int) -> Tensor:
        index = next(batches)
        return F.cross_entropy(network(inputs[index]), labels[index])

    return network, torch.optim.Adam(network.parameters(), lr=1e-3), None, loss


def _drops(generator: torch.Generator, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Step]:
    inputs, labels = _classes(generator, 8000)
    network = nn.Sequential(
        nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    batches = _batches(len(inputs), 64, generator)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    warm_up = steps // 20

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * 0.1 ** sum(step >= part * steps for part in (0.5, 0.75))

    def loss(step: int) -> Tensor:
        index = next(batches)
        return F.cross_entropy(network(inputs[index]), labels[index])

    return network, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale), loss


def _source(num_characters: int) -> tuple[Tensor, int]:
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += "".join(c for c in path.read_text(errors="ignore") if c.isascii())
        if len(text) >= num_characters:
            break
    index = {character: i for i, character in enumerate(sorted(set(text[:num_characters])))}
    return torch.tensor([index[character] for character in text[:num_characters]]), len(index)


class _GPT(nn.Module):
    def __init__(self, num_characters: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(num_characters, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, num_characters))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.blocks(self.token(tokens) + self.position)
        return logits


def _gpt(generator: torch.Generator, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Step]:
    text, num_characters = _source(400_000)
    length = 32
    network = _GPT(num_characters, length)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    warm_up = max(1, steps // 20)

    def scale(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))

    def loss(step: int) -> Tensor:
        starts = torch.randint(len(text) - length - 1, (8,), generator=generator)
        tokens = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        return F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return network, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale), loss


TRAININGS = {"classifier": _classifier, "gpt": _gpt, "drops": _drops}


def record(training: str, seed: int, steps: int, ranks: int = 1) -> dict[str, list[Curve]]:
    """Train; return the curves that ranks validate, by name."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network, optimizer, scheduler, loss_of = TRAININGS[training](torch.Generator().manual_seed(seed), steps)
    parameters = list(network.parameters())
    losses: list[Curve] = [[] for _ in range(ranks)]
    own_norms: list[Curve] = [[] for _ in range(ranks)]
    norms: Curve = []
    for step in range(steps):
        gradients: list[Sequence[Tensor]] = []
        for rank in range(ranks):  # one after the other, as far as they go
            loss = loss_of(step)
            gradients.append(torch.autograd.grad(loss, parameters))
            losses[rank].append(loss.item())
            own_norms[rank].append(torch.nn.utils.get_total_norm(gradients[-1]).item())
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {LOSS: losses, NORM: [norms]} | ({OWN_NORM: own_norms} if ranks > 1 else {})


def count(name: str, curve: Curve, factors: tuple[float, ...] = (3.0, 10.0, 100.0)) -> dict[str, Any]:
    """Return how many values of a faultless curve were flagged, and how many of the spikes injected into every tenth."""
    baseline = new_baselines()[name]
    false: dict[str, int] = {}
    injected = {factor: [0, 0] for factor in factors}
    for step, value in enumerate(curve):
        if step > baseline.warm_up and step % 10 == 0:
            for factor, found in injected.items():
                found[0] += baseline.judge(factor * value).is_bad
                found[1] += 1
        judgement = baseline.observe(value)
        if judgement.is_bad:
            kind = "false_spikes" if judgement.kind == "spike" else "false_nan"
            false[kind] = false.get(kind, 0) + 1
    return {"values": len(curve), **false, "found": injected}


def _measure(job: tuple[str, int, int, int]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    training, *options = job
    curves = record(training, *options)
    return training, [(name, count(name, curve)) for name, of_ranks in curves.items() for curve in of_ranks]


def measure(seeds: int, steps: int, processes: int = 2, ranks: int = 1) -> dict[str, Any]:
    """Return the totals of all trainings; for `benchmarks.rerun`, too."""
    jobs = [(training, seed, steps, ranks) for seed in range(seeds) for training in TRAININGS]
    totals: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for training, counts in pool.imap_unordered(_measure, jobs):
            for name, counted in counts:
                total = totals.setdefault(
                    f"{training} {name}", {"values": 0, "false_spikes": 0, "false_nan": 0, "found": {}}
                )
                for key in ("values", "false_spikes", "false_nan"):
                    total[key] += counted.get(key, 0)
                for factor, (found, of) in counted["found"].items():
                    before = total["found"].get(factor, (0, 0))
                    total["found"][factor] = (before[0] + found, before[1] + of)
    for total in totals.values():
        total["found"] = {f"x{factor:g}": round(found / of, 3) for factor, (found, of) in total["found"].items()}
    values, spikes = (sum(total[key] for total in totals.values()) for key in ("values", "false_spikes"))
    return {
        "false_spikes_per_10000": round(1e4 * spikes / values, 3),
        "false_nan": sum(total["false_nan"] for total in totals.values()),
        "curves": totals,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(measure(options.seeds, options.steps, options.processes, options.ranks), indent=2))


if __name__ == "__main__":
    main()
