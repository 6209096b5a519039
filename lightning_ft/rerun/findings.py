"""What rejected values turned out to be, and what follows for the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightning_ft.rerun.states import Call, RerunDiagnostic

PARAMETER_NORM = "parameter norm"
"""What is validated of the parameters that a step begins with: whatever the step computes follows from them."""


@dataclass(frozen=True)
class Finding:
    """A value that was rejected, and what running the step again made of it; plain data.

    Args:
        rank: On which rank.
        message: What was validated.
        sequence: The how manieth validation of that in the step, from 0.
        value: What it was.
        fatal: Whether it must not be applied.
        expected: What it should have been, for a reader.
        shared: Whether it is the same on all ranks: an average.
        micro_batch: Of which micro-batch of the step it is, from 0; None: of the whole step.
        rerun_value: What it was when the step was run again; None if that did not come to it.
        is_reproduced: Whether both are the same.
        is_still_bad: Whether the rerun's was rejected as well.
        diagnostic: What that means; None as long as nobody else was asked.

    """

    rank: int
    message: str
    sequence: int
    value: Any
    fatal: bool
    expected: str = ""
    shared: bool = False
    micro_batch: int | None = None
    rerun_value: Any = None
    is_reproduced: bool = False
    is_still_bad: bool = False
    diagnostic: RerunDiagnostic | None = None

    @property
    def is_of_parameters(self) -> bool:
        """Whether it is of what the step begins with."""
        return self.message.startswith(PARAMETER_NORM)

    @property
    def call(self) -> Call:
        """Which validation it is of."""
        return Call(self.message, self.sequence)

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "diagnostic": None if self.diagnostic is None else self.diagnostic.value}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Finding":
        """Return what :meth:`state_dict` was called of."""
        diagnostic = state["diagnostic"]
        return cls(**{**state, "diagnostic": None if diagnostic is None else RerunDiagnostic(diagnostic)})


SecondOpinion = Callable[[Sequence[Finding]], Mapping[int, RerunDiagnostic] | None]
"""Collective. Asks somebody else about values that the same device computed twice: who gets the findings of all ranks
returns, for their ranks, `CORRECT_RESULT` if another device computes the same from the same inputs, weights and random
numbers, and `PERSISTENT_ERROR` if it does not; None if there is nobody to ask. Must return the same on all ranks."""

Answer = Literal["same", "different", "bad", "same_device"]
"""What running a step elsewhere made of a value: the same, another one, another bad one, or nothing new: the device is the
one that computed it before."""


def next_move(findings: Sequence[Finding]) -> Literal["go_on", "run_again", "reproduced"]:
    """Return what follows from a rerun in place, given the findings of all ranks.

    A fatal value that was computed twice outweighs everything else: whatever the others say, it is still in the step.
    What came out differently but is bad again settles nothing, and is not to be applied either.
    """
    if any(finding.fatal and finding.is_reproduced for finding in findings):
        return "reproduced"
    if any(finding.fatal and finding.is_still_bad for finding in findings):
        return "run_again"
    return "reproduced" if any(finding.is_reproduced for finding in findings) else "go_on"


def of_culprits(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out what follows from others: parameters spoil the loss, a loss its gradient, a rank the average of all."""
    left = [finding for finding in findings if not any(_explains(cause, finding) for cause in findings)]
    told: dict[object, Finding] = {}
    for finding in left:  # an average is the same on all ranks: told of the first
        told.setdefault(finding.call if finding.shared else (finding.rank, finding.call), finding)
    return list(told.values())


def _explains(cause: Finding, finding: Finding) -> bool:
    """Whether one value follows from the other, which is as bad: else there is more to it."""
    if finding.is_of_parameters:
        is_later = False
    elif finding.shared:
        is_later = not cause.shared
    elif cause.is_of_parameters:
        is_later = cause.rank == finding.rank
    else:  # a gradient of the whole step, after its losses
        is_later = cause.rank == finding.rank and cause.micro_batch is not None and finding.micro_batch is None
    return (
        is_later
        and cause.fatal >= finding.fatal
        and cause.is_reproduced >= finding.is_reproduced
        and cause.is_still_bad >= finding.is_still_bad
    )


def diagnosed(findings: Sequence[Finding], opinion: Mapping[int, RerunDiagnostic] | None) -> list[Finding]:
    """Return the findings with what they turned out to be: by themselves if not reproduced, else by the opinion."""
    opinion = opinion or {}
    return [
        replace(
            finding,
            diagnostic=opinion.get(finding.rank) if finding.is_reproduced else RerunDiagnostic.TRANSIENT_ERROR,
        )
        for finding in findings
    ]


def after_resumption(
    findings: Sequence[Finding], answers: Sequence[Mapping[int, Answer]]
) -> tuple[Literal["go_on", "stop", "elsewhere"], list[Finding]]:
    """Return what follows from running a step elsewhere, and the findings with what they turned out to be.

    Args:
        findings: Those in the checkpoint.
        answers: What each rank says of them, by their index.

    """
    verdict: Literal["go_on", "stop", "elsewhere"] = "go_on"
    told = []
    for index, finding in enumerate(findings):
        heard = {row[index] for row in answers if index in row}
        diagnostic = None
        if "same" in heard:
            diagnostic = RerunDiagnostic.CORRECT_RESULT
        elif heard & {"different", "bad"}:
            diagnostic = RerunDiagnostic.PERSISTENT_ERROR
        elif heard and finding.fatal:
            verdict = "elsewhere"
        if finding.fatal and heard & {"same", "bad"} and verdict == "go_on":
            verdict = "stop"
        told.append(replace(finding, diagnostic=diagnostic))
    return verdict, told
