"""What a job knows, after it was resumed, about the step that was rejected before."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_ft.rerun.data_iterator import RerunDataIterator
from lightning_ft.rerun.findings import Answer, Finding
from lightning_ft.rerun.passes import Compare, Passes
from lightning_ft.rerun.random_state import random_state, set_random_state
from lightning_ft.rerun.ranks import Ranks
from lightning_ft.rerun.states import RerunValidationStatus

Track = Callable[[RerunValidationStatus, Any, str], None]


class Suspicion:
    """Where the step was computed, from what, so that it is run once more and what comes out is compared.

    Args:
        where: This device: node and name.

    """

    def __init__(self, where: Sequence[str]) -> None:
        self._where = list(where)
        self._origins: dict[int, list[str]] = {}
        self._iterators: dict[int, Any] = {}
        self._random_states: dict[int, Any] = {}

    def collect(self, ranks: Ranks, iterators: Sequence[RerunDataIterator]) -> dict[str, Any]:
        """Collective. Return it as plain data, for the checkpoint of the job that ends because of it."""
        states = [iterator.state_dict() for iterator in iterators]
        told = ranks.gather((ranks.rank, self._where, states, random_state()))
        return {
            "origins": {rank: where for rank, where, _, _ in told},
            "data_iterators": {rank: states for rank, _, states, _ in told},
            "random_states": {rank: random for rank, _, _, random in told},
        }

    @staticmethod
    def none() -> dict[str, Any]:
        """Return the same for a job in which nothing is rejected."""
        return {"origins": {}, "data_iterators": {}, "random_states": {}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it from a checkpoint."""
        self._origins = {int(rank): list(where) for rank, where in state["origins"].items()}
        self._iterators = {int(rank): states for rank, states in state["data_iterators"].items()}
        self._random_states = {int(rank): random for rank, random in state["random_states"].items()}

    def begin(self, rank: int, iterators: Sequence[RerunDataIterator]) -> None:
        """Let the step begin with the inputs and random numbers that ``rank`` had."""
        for iterator, state in zip(iterators, self._iterators.get(rank, ()), strict=False):
            iterator.load_state_dict(state)
            iterator.rewind()
        if rank in self._random_states:
            set_random_state(self._random_states[rank])

    def answers(
        self,
        findings: Sequence[Finding],
        rank: int,
        passes: Passes,
        compare: Callable[[Compare, Any, Any], float],
        track: Track,
    ) -> dict[int, Answer]:
        """Return what running the step of ``rank`` here says of its findings, by their index."""
        answers: dict[int, Answer] = {}
        for index, finding in enumerate(findings):
            again = passes.newest(finding.call)
            if finding.rank != rank or again is None:
                continue
            is_same = compare(again.compare, finding.value, again.result) <= again.tolerance
            is_bad = again.is_rejected and again.fatal
            answers[index] = "same" if is_same else "bad" if is_bad else "different"
            if self._origins.get(finding.rank) == self._where:
                answers[index] = "same_device"
                continue
            told = RerunValidationStatus
            status = told.SECOND_RERUN_REPRODUCIBLE if is_same else told.SECOND_RERUN_NOT_REPRODUCIBLE
            track(status, again.result, finding.message)
        return answers
