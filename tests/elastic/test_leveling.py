"""Ranks tell each other how far they are; those that are too far behind are found, alike on all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ft.elastic.leveling import LeftBehind, Leveling, Standing
from lightning_ft.elastic.vigil import Vigil
from lightning_ft.errors import ReconfigurationError
from lightning_ft.events.log import EventLog


class Told:
    """A group in which the others have completed so many operations."""

    def __init__(self, *sequences: int) -> None:
        self.sequences = sequences

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> "Told":
        for row, sequence in zip(outputs[0], self.sequences, strict=True):
            row.copy_(torch.tensor([sequence, 0, 0, 0, 0]))
        return self

    def wait(self) -> None:
        pass


def level(sequences: tuple[int, ...], rank: int, shards: list[int]) -> None:
    group: Any = Told(*sequences)
    vigil = Vigil(1, lambda: False, lambda message: None, 1.0, 1.0)
    members = tuple(range(len(sequences)))
    Leveling(group, members, rank, shards, EventLog(0), vigil).run(Standing(sequences[rank], False, False), None, None)


def test_a_rank_that_was_left_behind_without_a_replica_is_named_to_itself_and_the_others_go_on_without_it() -> None:
    for rank, is_this_one in ((0, False), (2, True), (3, False)):
        with pytest.raises(LeftBehind) as caught:
            level((9, 9, 5, 9), rank, [0, 1, 0, 1])
        assert caught.value.is_this_one == is_this_one


def test_ranks_that_are_too_far_apart_without_ever_having_lost_a_replica_are_an_error() -> None:
    with pytest.raises(ReconfigurationError, match=r"ranks completed \[9, 7\] operations; at most 1 apart expected"):
        level((9, 7), 0, [0, 0])
