"""The values of the pass that is over, as far as they are validated."""

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ft.loops.window import MicroBatch
from lightning_ft.rerun.findings import PARAMETER_NORM
from lightning_ft.rerun.gradient_norm import gradient_norm, total_norm
from lightning_ft.rerun.step_values import Measured, measure


def measure_parameters(pl_module: LightningModule) -> list[Measured]:
    """Collective if parameters are sharded. Return what is validated of the parameters that a step begins with."""
    norm = total_norm(pl_module.parameters())
    return [] if norm is None else [Measured(PARAMETER_NORM, float(norm))]


def are_finite(pl_module: LightningModule) -> bool:
    """Return whether all that this rank holds of the parameters is finite."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters()]
    return all(bool(parameter.detach().isfinite().all()) for parameter in held)


def measure_pass(
    trainer: Trainer, pl_module: LightningModule, micro_batches: Sequence[MicroBatch], own_norm: Tensor | None
) -> list[Measured]:
    """Collective if parameters are sharded. Return losses and gradient norms.

    Args:
        trainer: The trainer.
        pl_module: Its module, with the averaged gradient.
        micro_batches: Those of the step.
        own_norm: The norm of what this rank contributed.

    """
    losses = [(i, m.loss) for i, m in enumerate(micro_batches) if m.is_own and m.loss is not None]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = None if scaler is None else float(scaler.get_scale())
    # FTStrategy may know it already, from when it waited for messages.
    norm = getattr(trainer.strategy, "take_average_norm", lambda: None)()
    return measure(losses, gradient_norm(pl_module.parameters()) if norm is None else norm, own_norm, scale)
