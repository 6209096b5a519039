"""What is dumped in which phase: options, in which a phase overrides those for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ft.dump.selection import check_patterns
from lightning_ft.elastic.checks import check_count

PHASES = ("train", "validate", "test", "predict")


@dataclass(frozen=True)
class PhaseOptions:
    """What is dumped in one phase.

    Args:
        enable: Whether anything is.
        filter: Patterns of names; see :class:`~lightning_ft.dump.selection.Selection`.
        every_n_rollouts: Only rollouts whose id is a multiple of this.
        rollouts: Only these rollouts; None: all.
        max_bytes: How many bytes of copies may wait to be written. The training waits when there would be more.
        dtype: What floating-point tensors are written as, such as ``"bfloat16"`` or ``torch.bfloat16``; None: as they are.

    Raises:
        ValueError: If a value is not valid.

    """

    enable: bool = True
    filter: list[str] = field(default_factory=lambda: ["*"])
    every_n_rollouts: int = 1
    rollouts: list[int] | None = None
    max_bytes: int = 256 * 2**20
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_count("TensorDump", "every_n_rollouts", self.every_n_rollouts, least=1)
        check_count("TensorDump", "max_bytes", self.max_bytes, least=1)
        check_patterns(self.filter)
        self.torch_dtype()

    def selects(self, rollout: int) -> bool:
        """Return whether a rollout is dumped."""
        return self.enable and rollout % self.every_n_rollouts == 0 and (self.rollouts is None or rollout in self.rollouts)

    def torch_dtype(self) -> torch.dtype | None:
        """Return what floating-point tensors are written as.

        Raises:
            ValueError: If there is no such floating-point type.

        """
        if self.dtype is None:
            return None
        found = getattr(torch, self.dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(
                f"`TensorDump(dtype={self.dtype!r})` is not valid: expected the name of a floating-point type of torch, such"
                " as 'bfloat16', or None."
            )
        return found


def options_of(config: Mapping[str, Any] | DictConfig | None, phase: str) -> PhaseOptions:
    """Return the options of ``phase``: those at the top of ``config``, overridden by those under the phase's name.

    Args:
        config: Options for all phases, and under ``train``, ``validate``, ``test`` and ``predict`` those of one.
        phase: One of :data:`PHASES`.

    Raises:
        ValueError: If an option does not exist or is not valid.

    """
    given = _as_config({} if config is None else config)
    _check_names(given)
    base = {name: value for name, value in given.items() if name not in PHASES}
    parts = [_listed(part) for part in (base, given.get(phase) or {})]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(PhaseOptions), *parts)
        made = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        known = ", ".join(entry.name for entry in fields(PhaseOptions))
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`TensorDump(config=...)` is not valid, merged for the phase {phase!r}: {reason}. Expected {known}, and under"
            f" {', '.join(PHASES)} the same for that phase."
        ) from error
    assert isinstance(made, dict)
    return PhaseOptions(**{str(name): value for name, value in made.items()})


def _as_config(config: Mapping[str, Any] | DictConfig) -> DictConfig:
    if not isinstance(config, (DictConfig, Mapping)):
        raise ValueError(f"`TensorDump(config={config!r})` is not valid: expected a mapping of options, or None.")
    plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else _with_names_of_types(config)
    try:
        made = OmegaConf.create(plain)
    except OmegaConfBaseException as error:
        raise ValueError(f"`TensorDump(config=...)` is not valid: {str(error).splitlines()[0]}") from error
    assert isinstance(made, DictConfig)
    return made


def _with_names_of_types(part: Mapping[Any, Any]) -> dict[Any, Any]:
    """Let a type stand for its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_names_of_types(value)
        return str(value) if isinstance(value, torch.dtype) else value

    return {name: plain(value) for name, value in part.items()}


def _check_names(config: DictConfig) -> None:
    """Raise ValueError if there are options that do not exist, or something else than options under a phase."""
    options = [entry.name for entry in fields(PhaseOptions)]
    _check_known("", config, [*options, *PHASES])
    for phase in PHASES:
        part = config.get(phase)
        if part is not None and not isinstance(part, DictConfig):
            raise ValueError(
                f"`TensorDump(config={{{phase!r}: {part!r}}})` is not valid: expected a mapping of options, such as"
                ' {"enable": False}.'
            )
        _check_known(f"{phase}.", part or {}, options)


def _check_known(where: str, part: Mapping[Any, Any], known: list[str]) -> None:
    for name in map(str, part):
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"`TensorDump(config=...)` is not valid: there is no `{where}{name}`.{hint} Expected {', '.join(known)}."
            )


def _listed(part: Mapping[Any, Any]) -> dict[Any, Any]:
    """Let one pattern stand for a list of one."""
    return {name: [value] if name == "filter" and isinstance(value, str) else value for name, value in part.items()}
