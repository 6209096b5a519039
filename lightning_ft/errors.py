"""The errors of this package.

Every error keeps its fields in ``args``, so that it pickles and compares after a trip between processes, and also
derives from the builtin that callers may already catch.
"""

from collections.abc import Mapping, Sequence


def _name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2``, for the middle of a sentence."""
    if not ranks:
        return "no rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


class FaultToleranceError(Exception):
    """Root of the tree: something about living through faults went wrong."""


class CollectiveMismatchError(FaultToleranceError, RuntimeError):
    """Two ranks entered different collective operations.

    Args:
        operation: What ``ranks`` were about to do.
        ranks: Global ranks that entered ``operation``.
        other_operation: What ``other_ranks`` were about to do.
        other_ranks: Global ranks that entered ``other_operation``.

    """

    def __init__(self, operation: str, ranks: Sequence[int], other_operation: str, other_ranks: Sequence[int]) -> None:
        self.operation = operation
        self.ranks = tuple(ranks)
        self.other_operation = other_operation
        self.other_ranks = tuple(other_ranks)
        super().__init__(operation, self.ranks, other_operation, self.other_ranks)

    def __str__(self) -> str:
        return (
            f"Ranks disagree about the next collective: {_name_ranks(self.ranks)} entered {self.operation}, "
            f"{_name_ranks(self.other_ranks)} entered {self.other_operation}. Nothing was exchanged. Every rank must "
            "call the same collectives in the same order; look for one inside a branch that only some ranks take."
        )


class CollectiveTimeoutError(FaultToleranceError, TimeoutError):
    """A wait for other ranks took longer than it may.

    Args:
        operation: What was waited for.
        timeout: How long, in seconds.
        missing: Global ranks that did not come; empty if it is not known who.

    """

    def __init__(self, operation: str, timeout: float, missing: Sequence[int] = ()) -> None:
        super().__init__()
        self.operation = operation
        self.timeout = timeout
        self.missing = tuple(missing)
        self.args = (operation, timeout, self.missing)  # set here: OSError reads a third argument as a file name

    def __str__(self) -> str:
        missing = _name_ranks(self.missing) if self.missing else "the other ranks"
        return f"`{self.operation}` waited {self.timeout:g} s for {missing} and gave up."


class GroupBrokenError(FaultToleranceError, RuntimeError):
    """Ranks can no longer reach each other in the generation that they are in; what they were in is tried in the next.

    Args:
        reason: How it was noticed.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class ExcludedError(FaultToleranceError, RuntimeError):
    """This rank was taken out of the run; the others go on without it.

    Args:
        slot: The slot that was excluded.
        reason: Why, as given by whoever excluded it.

    """

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot = slot
        self.reason = reason

    def __str__(self) -> str:
        return f"Slot {self.slot} was excluded from the run: {self.reason}. The other ranks go on without it."


class NotEnoughReplicasError(FaultToleranceError, RuntimeError):
    """Fewer replicas are alive than the run needs, and none came back in time.

    Args:
        num_live: Replicas that are alive.
        min_replicas: Replicas that the run needs.
        waited: Seconds waited for one to come back.
        checkpoint: Path of the last intact checkpoint, if there is one.

    """

    def __init__(self, num_live: int, min_replicas: int, waited: float = 0.0, checkpoint: str | None = None) -> None:
        super().__init__(num_live, min_replicas, waited, checkpoint)
        self.num_live = num_live
        self.min_replicas = min_replicas
        self.waited = waited
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        intact = f"Still intact: {self.checkpoint}." if self.checkpoint else "There is no checkpoint yet."
        return (
            f"{self.num_live} of the {self.min_replicas} replicas that `min_replicas={self.min_replicas}` asks for are "
            f"alive, and none came back within {self.waited:g} s. {intact}"
        )


class StoppedError(FaultToleranceError, RuntimeError):
    """The supervisor ended the job: it cannot go on.

    Args:
        reason: Why, and what is still intact.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ReconfigurationError(FaultToleranceError, RuntimeError):
    """The survivors could not agree on a new generation.

    Args:
        generation: The last generation that was tried.
        attempts: How many were tried.
        reason: What failed in the last one.

    """

    def __init__(self, generation: int, attempts: int, reason: str) -> None:
        super().__init__(generation, attempts, reason)
        self.generation = generation
        self.attempts = attempts
        self.reason = reason

    def __str__(self) -> str:
        tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"Generation {self.generation} could not be set up ({tries}): {self.reason}."


class SupervisorLostError(FaultToleranceError, ConnectionError):
    """The supervisor is gone; without it nobody starts or counts ranks.

    Args:
        reason: How it was noticed.

    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
        self.args = (reason,)

    def __str__(self) -> str:
        return f"The supervisor of this run is gone: {self.reason}. This rank ends; start the run again to resume."


class UnsupportedStateError(FaultToleranceError, TypeError):
    """A part of the training state cannot be sent to a joining rank.

    Args:
        path: Where it is, written like the expression that reads it.
        type_name: The type that is not supported, or what is wrong with the value.
        advice: What to do about it.

    """

    def __init__(self, path: str, type_name: str, advice: str) -> None:
        super().__init__(path, type_name, advice)
        self.path = path
        self.type_name = type_name
        self.advice = advice

    def __str__(self) -> str:
        return f"The state at `{self.path}` cannot be sent to another rank: {self.type_name}. {self.advice}"


class StateUnavailableError(FaultToleranceError, RuntimeError):
    """A rank that joins gets no state: collecting it failed in the live rank that was to hand it out.

    Args:
        source: Global rank that could not collect it.
        reason: What was raised there, with its traceback.

    """

    def __init__(self, source: int, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        *trace, last = self.reason.strip().splitlines()
        return "\n".join([f"Rank {self.source} could not collect the state for a rank that joins: {last}", *trace])


class MalformedStateError(FaultToleranceError, ValueError):
    """Received training state is not what a peer of this version would send.

    Args:
        reason: What is wrong with it.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"The received state is malformed: {self.reason}. Nothing was loaded from it."


class ReplicaLostError(FaultToleranceError, RuntimeError):
    """Ranks died that held parts of the state which nobody else has.

    Args:
        num_left: How many ranks are left.
        num_slots: How many there are without faults.

    """

    def __init__(self, num_left: int, num_slots: int) -> None:
        super().__init__(num_left, num_slots)
        self.num_left = num_left
        self.num_slots = num_slots

    def __str__(self) -> str:
        return (
            f"{self.num_left} of {self.num_slots} ranks are left, and there is no whole snapshot of the state in memory: the"
            " first one is taken before the first batch. Start the run again, from a checkpoint if there is one."
        )


class UnusedParametersError(FaultToleranceError, RuntimeError):
    """A step left parameters without a gradient that are to be trained.

    Args:
        names: Names of the parameters.

    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(self.names)

    def __str__(self) -> str:
        shown = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        return (
            f"Backward reached no gradient of {shown} on at least one rank, in the step under way; no weight was changed by"
            " it. Expected all parameters to be used in `training_step` and to contribute to the loss. If some are unused"
            " on purpose, use `FTStrategy(find_unused_parameters=True)` or set `requires_grad=False` on them."
        )


class DamagedCheckpointError(FaultToleranceError, RuntimeError):
    """A checkpoint is not what was saved; nothing was loaded from it.

    Args:
        path: The checkpoint.
        reason: Which file is damaged, and how.
        intact: Path of the newest intact one beside it, if there is one and somebody looked.

    """

    def __init__(self, path: str, reason: str, intact: str | None = None) -> None:
        super().__init__(path, reason, intact)
        self.path = path
        self.reason = reason
        self.intact = intact

    def __str__(self) -> str:
        intact = f" Still intact: {self.intact}." if self.intact else ""
        return f"Checkpoint {self.path} is damaged: {self.reason}. Nothing was loaded from it.{intact}"


class StateNotLoadedError(FaultToleranceError, RuntimeError):
    """Another rank could not load a checkpoint, so that this one did not load it either.

    Args:
        problem: Which rank, and why.

    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"Nothing was loaded on any rank: {self.problem}"


class WorldSizeChangedError(FaultToleranceError, RuntimeError):
    """A checkpoint was saved by another number of ranks than are to load it.

    Args:
        path: The checkpoint.
        saved: How many saved it.
        current: How many there are.

    """

    def __init__(self, path: str, saved: int, current: int) -> None:
        super().__init__(path, saved, current)
        self.path = path
        self.saved = saved
        self.current = current

    def __str__(self) -> str:
        return (
            f"Checkpoint {self.path} is of {self.saved} ranks, and there are {self.current}: places in the data and random"
            " numbers are not theirs. Nothing was loaded. Pass `allow_world_size_change=True` and `rank_local_transform`."
        )


class DumpError(FaultToleranceError, RuntimeError):
    """A dump can't be read, or not be compared with another one.

    Args:
        path: The dump.
        reason: Why.
        action: What can't be done with it.

    """

    def __init__(self, path: str, reason: str, action: str = "be read") -> None:
        super().__init__(path, reason, action)
        self.path = path
        self.reason = reason
        self.action = action

    def __str__(self) -> str:
        return f"The dump {self.path} can't {self.action}: {self.reason}."


class CheckpointNotCommittedError(FaultToleranceError, RuntimeError):
    """A checkpoint that was to be saved does not exist; nothing is left of it.

    Args:
        step: Optimizer steps completed when it was taken.
        reason: What failed.
        because_of_death: Whether that was a rank's death alone, so that the others can save again.
        intact: Path of the newest checkpoint of this run that is there.

    """

    def __init__(self, step: int, reason: str, because_of_death: bool = False, intact: str | None = None) -> None:
        super().__init__(step, reason, because_of_death, intact)
        self.step = step
        self.reason = reason
        self.because_of_death = because_of_death
        self.intact = intact

    def __str__(self) -> str:
        intact = f"Still intact: {self.intact}." if self.intact else "There is no earlier one of this run."
        return f"The checkpoint of step {self.step} was not committed: {self.reason}. {intact}"


class StoreUnreachableError(FaultToleranceError, RuntimeError):
    """A store did not answer, or refused to: it is not known what is there.

    Args:
        path: What it was asked for.
        reason: Why.

    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"`{self.path}` could not be reached: {self.reason}. Check the address, the credentials and the connection."


class CorruptedStateError(FaultToleranceError, RuntimeError):
    """Ranks that must hold the same parameters and optimizer state do not.

    Args:
        step: Optimizer steps completed when that was noticed.
        differing: For each slot that is outvoted or, if nobody is, that differs, the names of what does.
        is_decided: Whether a majority tells which of them is right.
        agreed: Newest step after which all were seen to hold the same, if there is one.

    """

    def __init__(self, step: int, differing: Mapping[int, Sequence[str]], is_decided: bool, agreed: int | None) -> None:
        self.step = step
        self.differing = {slot: tuple(names) for slot, names in differing.items()}
        self.is_decided = is_decided
        self.agreed = agreed
        super().__init__(step, self.differing, is_decided, agreed)

    @property
    def finding(self) -> str:
        """What was found, without what to do about it."""
        told = "; ".join(f"slot {slot}: {_shortened(names)}" for slot, names in self.differing.items())
        decided = "Most ranks agree on another one" if self.is_decided else "No majority tells which of them is right"
        return f"Replicas hold different states after step {self.step} ({told}). {decided}."

    def __str__(self) -> str:
        advice = "Nothing was compared before: if it comes again, your code changes parameters in one rank only."
        if self.agreed is not None:
            advice = f"They agreed after step {self.agreed}: resume from a checkpoint of that step or before."
        return f"{self.finding} {advice}"


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class GatheredParametersError(FaultToleranceError, RuntimeError):
    """A method used parameters of a sharded module that are not gathered in it.

    Args:
        method: Its name.
        operation: What it did with it.

    """

    def __init__(self, method: str, operation: str) -> None:
        self.method = method
        self.operation = operation
        super().__init__(method, operation)

    def __str__(self) -> str:
        return (
            f"`{self.method}` used a parameter of a sharded module ({self.operation}) outside of the forward pass of the"
            " submodule that it belongs to. Expected it to call that submodule. Or shard the module as a whole, with"
            " `FTStrategy(sharding=ShardingOptions(units=[]))`; in manual optimization, where that is not possible, use"
            " `FTStrategy(shard_size=1)`."
        )


class ResultRejectedError(FaultToleranceError, RuntimeError):
    """A value of a step is bad, and running the step again is switched off.

    Args:
        message: What it is.
        value: The value, as text.
        step: The step that it is of, from 1.

    """

    def __init__(self, message: str, value: str, step: int) -> None:
        super().__init__(message, value, step)
        self.message = message
        self.value = value
        self.step = step

    def __str__(self) -> str:
        return (
            f"Step {self.step} was rejected: {self.message} ({self.value}). It was not applied. Rerun validation is"
            ' "disabled"; with mode "validate_results" the step is run again to find out why.'
        )


class DiscontinuityError(FaultToleranceError, RuntimeError):
    """After a restart the training did not go on as before, and it was asked to stop then.

    Args:
        step: The last step before the restart.
        reason: What the restart was.
        verdict: What was found.

    """

    def __init__(self, step: int, reason: str, verdict: str) -> None:
        super().__init__(step, reason, verdict)
        self.step = step
        self.reason = reason
        self.verdict = verdict

    def __str__(self) -> str:
        return (
            f"The training did not go on as before {self.verdict}. Checkpoints of step {self.step} and before are from the"
            ' time before it. Resume from one of them, or use `TrainingHealth(on_discontinuity="warn")` to train on.'
        )
