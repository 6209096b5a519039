"""The words of rerun validation: those of Megatron's rerun state machine, so that launchers and log parsers carry over."""

from enum import Enum, IntEnum
from typing import NamedTuple

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
"""The job is to be resumed from its checkpoint on other devices, which tells a broken device from a wrong value."""
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
"""A value was rejected, and running the step again does not help."""


class RerunMode(str, Enum):
    """What validation does."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunDiagnostic(str, Enum):
    """What a rejected value turned out to be."""

    CORRECT_RESULT = "correct_result"
    """Another device computes the same: the data or the model is to blame."""
    TRANSIENT_ERROR = "transient_error"
    """The same device computed something else the next time."""
    PERSISTENT_ERROR = "persistent_error"
    """The same device computes it again, another one does not."""


class RerunState(IntEnum):
    """Where the state machine is."""

    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1
    RERUNNING_IN_PLACE = 2
    WILL_RERUN_FROM_CHECKPOINT = 3
    RERUNNING_FROM_CHECKPOINT = 4
    RERUNNING_AGAIN_FROM_CHECKPOINT = 5


class RerunValidationStatus(str, Enum):
    """What a line of the tracker file says."""

    RERUN_DISABLED = "rerun_disabled"
    INITIAL_RUN = "initial_run"
    FIRST_RERUN_REPRODUCIBLE = "first_rerun_reproducible"
    FIRST_RERUN_NOT_REPRODUCIBLE = "first_rerun_not_reproducible"
    SECOND_RERUN_REPRODUCIBLE = "second_rerun_reproducible"
    SECOND_RERUN_NOT_REPRODUCIBLE = "second_rerun_not_reproducible"


class Call(NamedTuple):
    """One validation within a step: what is validated, and how often that was before in the same pass."""

    message: str
    sequence: int
