"""What becomes of a step, given what its rejected values turned out to be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ft.elastic.checks import check_choice
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.states import RerunDiagnostic
from lightning_ft.rerun.step_values import OVERFLOW

Action = Literal["apply", "skip_update", "skip_batch", "stop"]

SKIPS = ("skip_update", "skip_batch")
_BY_CARE: tuple[Action, ...] = ("apply", "skip_update", "skip_batch", "stop")


@dataclass(frozen=True)
class Policy:
    """What was asked for; the arguments are those of `RerunValidation`.

    Raises:
        ValueError: If a value is not valid.

    """

    on_correct: Action
    on_spike: Action
    on_persistent: Literal["exclude", "stop"]
    without_opinion: Literal["checkpoint", "assume_correct"]

    def __post_init__(self) -> None:
        for name, choices in (
            ("on_correct", _BY_CARE),
            ("on_spike", _BY_CARE),
            ("on_persistent", ("exclude", "stop")),
            ("without_opinion", ("checkpoint", "assume_correct")),
        ):
            check_choice("RerunValidation", name, getattr(self, name), choices)

    def action(self, findings: Sequence[Finding]) -> Action:
        """Return what becomes of a step: the most careful of what its findings ask for."""
        return max(map(self._wish, findings), key=_BY_CARE.index, default="apply")

    def _wish(self, finding: Finding) -> Action:
        if finding.diagnostic == RerunDiagnostic.TRANSIENT_ERROR:
            return "apply"  # what the rerun computed
        if finding.diagnostic == RerunDiagnostic.PERSISTENT_ERROR:
            return "stop"
        if finding.message.endswith(OVERFLOW):
            return "apply"  # which a GradScaler does not
        if finding.is_of_parameters and finding.fatal and self.on_correct in SKIPS:
            return "stop"  # the next step would begin with the same
        return self.on_correct if finding.fatal else self.on_spike
