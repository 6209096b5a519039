"""What optimizer steps change: parameters, the state of the optimizers, the state of a GradScaler."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

Settings = list[list[dict[str, Any]]]
"""For each optimizer its groups' learning rates and the like."""


class TrainingSnapshot:
    """A copy of it.

    Args:
        trainer: The trainer.
        pl_module: Its module.

    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._parameters = copy_parameters(pl_module)
        self._states = [_copy_state(optimizer.state) for optimizer in trainer.optimizers]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the training go on from here inside, and be as it is now afterwards."""
        optimizers: list[Any] = list(self._trainer.optimizers)
        live = copy_parameters(self._pl_module)
        gradients = [(parameter, parameter.grad) for parameter in live]
        states, settings = [optimizer.state for optimizer in optimizers], settings_of(optimizers)
        scaler = scaler_state(self._trainer)
        try:
            _load_parameters(self._parameters)
            for optimizer, state in zip(optimizers, self._states, strict=True):
                optimizer.state = _copy_state(state)
            yield
        finally:
            _load_parameters(live)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.state = state
            load_settings(optimizers, settings)
            load_scaler_state(self._trainer, scaler)


def settings_of(optimizers: Iterable[Optimizer]) -> Settings:
    """Return learning rates and whatever else schedulers may change."""
    return [
        [{name: _own(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def load_settings(optimizers: Iterable[Optimizer], settings: Settings) -> None:
    """Let optimizers have ``settings``, which :func:`settings_of` returned."""
    for optimizer, of_groups in zip(optimizers, settings, strict=True):
        for group, values in zip(optimizer.param_groups, of_groups, strict=True):
            group.update({name: _own(value) for name, value in values.items()})


def scaler_state(trainer: Trainer) -> dict[str, Any] | None:
    """Return the state of the GradScaler, if there is one."""
    scaler = _scaler(trainer)
    return None if scaler is None else dict(scaler.state_dict())


def load_scaler_state(trainer: Trainer, state: dict[str, Any] | None) -> None:
    """Let the GradScaler be in ``state``."""
    if state is not None:
        _scaler(trainer).load_state_dict(state)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


@torch.no_grad()
def copy_parameters(module: Module) -> dict[Parameter, Tensor]:
    """Return a copy of each parameter, of sharded ones of this rank's shard."""
    return {parameter: parameter.detach().clone() for parameter in module.parameters()}


@torch.no_grad()
def _load_parameters(values: Mapping[Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)


def _copy_state(state: Mapping[Any, Any]) -> "defaultdict[Any, dict[str, Any]]":
    copies: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for key, values in state.items():
        copies[key] = {name: _own(value) for name, value in values.items()} if isinstance(values, dict) else _own(values)
    return copies


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
