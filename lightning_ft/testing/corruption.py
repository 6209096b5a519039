"""Values that go wrong in a training step, for tests of what is to notice it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_ft.elastic.checks import check_choice, check_count
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.rerun.batches import tensors_of

CorruptionKind = Literal["nan", "inf", "spike", "bit_flip"]
CorruptedValue = Literal["loss", "gradient", "activation", "parameter", "batch"]
_EXPONENT_BITS = range(30, 22, -1)  # of float32
_SPIKE = 1e6


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One value that goes wrong.

    Args:
        kind: "nan", "inf", "spike": times a million; "bit_flip": the highest bit of its exponent that is 0 becomes 1, of
            the largest element. (A flip of a low bit changes nothing that could be told from a rounding.)
        where: "loss"; "gradient": of the last parameter in one backward pass, or of the last layer's output where
            parameters are sharded; "activation": an output of the last layer; "parameter": an element of the last
            parameter, for good; "batch": an element of the first tensor with fractions, before anything is done with it.
        batch_idx: In which batch of the epoch.
        epoch: In which epoch.
        slot: In which slot (rank, but under FTStrategy); None: in all of them.
        lasting: Whether it goes wrong each time that the batch is run, as in a broken device; otherwise the first time.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is not valid.

    """

    kind: CorruptionKind
    where: CorruptedValue
    batch_idx: int
    epoch: int = 0
    slot: int | None = None
    lasting: bool = False

    def __post_init__(self) -> None:
        check_choice("Corruption", "kind", self.kind, get_args(CorruptionKind))
        check_choice("Corruption", "where", self.where, get_args(CorruptedValue))
        check_count("Corruption", "batch_idx", self.batch_idx)
        check_count("Corruption", "epoch", self.epoch)

    def corrupt(self, values: Tensor) -> Tensor:
        """Return ``values`` of which the largest one is multiplied by what makes it go wrong."""
        factors = torch.ones_like(values.detach()).flatten()
        index = int(values.detach().abs().argmax())
        factors[index] = self._factor(float(values.detach().flatten()[index]))
        return values * factors.view(values.shape)

    def _factor(self, value: float) -> float:
        if self.kind != "bit_flip":
            return {"nan": math.nan, "inf": math.inf, "spike": _SPIKE}[self.kind]
        bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
        unset = next((bit for bit in _EXPONENT_BITS if not bits >> bit & 1), _EXPONENT_BITS[-1])
        flipped = float(torch.tensor(bits ^ 1 << unset, dtype=torch.int32).view(torch.float32))
        factor = flipped / value if value else math.inf
        return min(factor, torch.finfo(torch.float32).max) if math.isfinite(factor) else factor


class Corruptions(Callback):
    """Lets values of a training go wrong, each corruption once, or as long as its batch is run again.

    Put it before :class:`~lightning_ft.callbacks.RerunValidation`.

    Args:
        corruptions: What goes wrong where, or the fields of it as dictionaries.

    Example::

        plan = Corruptions([Corruption(kind="bit_flip", where="gradient", batch_idx=10, slot=1)])
        Trainer(devices=2, strategy=FTStrategy(), callbacks=[plan, RerunValidation()])

    """

    def __init__(self, corruptions: Sequence[Corruption | Mapping[str, Any]]) -> None:
        made = [c if isinstance(c, Corruption) else Corruption(**c) for c in corruptions]
        self.corruptions = tuple(made)
        self.counts = [0] * len(made)
        """How often each of them happened."""
        self._due: list[int] = []
        self._strategy: Any = None
        self._handles: list[Any] = []
        self._mine: list[int] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        environment = RankEnvironment.of_process()
        slot = trainer.global_rank if environment is None else environment.slot
        mine = [i for i, c in enumerate(self.corruptions) if c.slot in (None, slot)]
        training_step: Any = trainer.strategy.training_step
        parameter = [p for p in pl_module.parameters() if p.requires_grad][-1]
        layer = [m for m in pl_module.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding)][-1]

        def corrupted_step(batch: Any, batch_idx: int, *args: Any) -> Any:
            self._due = [index for index in mine if self._is_due(index, trainer, batch_idx)]
            for corruption in self._take("parameter"):
                with torch.no_grad():
                    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    held.copy_(corruption.corrupt(held))
            output = training_step(batch, batch_idx, *args)
            for corruption in self._take("loss"):
                output = _with_loss(output, corruption)
            return output

        def corrupted_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            for corruption in self._take("activation"):
                output = corruption.corrupt(output)
            if isinstance(parameter, DTensor) and output.requires_grad:
                output.register_hook(corrupted_gradient)
            return output

        def corrupted_gradient(gradient: Tensor) -> Tensor:
            for corruption in self._take("gradient"):
                gradient = corruption.corrupt(gradient)
            return gradient

        self._handles = [layer.register_forward_hook(corrupted_output)]
        if not isinstance(parameter, DTensor):  # which backward does not come to
            self._handles.append(parameter.register_hook(corrupted_gradient))
        self._strategy = trainer.strategy
        trainer.strategy.training_step = corrupted_step  # type: ignore[method-assign]
        self._mine = mine

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._due = [index for index in self._mine if self._is_due(index, trainer, batch_idx)]
        for corruption in self._take("batch"):
            values = next(tensor for tensor in tensors_of(batch) if tensor.is_floating_point())
            values.copy_(corruption.corrupt(values))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._strategy is not None:
            vars(self._strategy).pop("training_step", None)
            self._strategy = None

    def _is_due(self, index: int, trainer: Trainer, batch_idx: int) -> bool:
        corruption = self.corruptions[index]
        is_here = (corruption.epoch, corruption.batch_idx) == (trainer.current_epoch, batch_idx)
        return is_here and (corruption.lasting or not self.counts[index])

    def _take(self, where: CorruptedValue) -> list[Corruption]:
        """Return what goes wrong here and now, once for each run of a batch."""
        taken = [index for index in self._due if self.corruptions[index].where == where]
        self._due = [index for index in self._due if index not in taken]
        for index in taken:
            self.counts[index] += 1
        return [self.corruptions[index] for index in taken]


def _with_loss(output: Any, corruption: Corruption) -> Any:
    if isinstance(output, Mapping):
        return {**output, "loss": corruption.corrupt(output["loss"])}
    return corruption.corrupt(output)
