"""State whose sharded tensors are put together from pieces, whatever the numbers of ranks."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ft.sharding.shard_tree import chunk_bounds, put_together_whole

WEIGHT = torch.arange(7 * 4 * 3.0).reshape(7, 4, 3)


def states_of(weight: Tensor, count: int, dim: int) -> list[Any]:
    pieces = list(weight.chunk(count, dim))
    pieces += [weight.narrow(dim, 0, 0)] * (count - len(pieces))
    piece = [{"lightning_ft.piece": piece, "size": list(weight.shape), "dim": dim} for piece in pieces]
    own = [[rank] * rank for rank in range(count)]  # of another length on each rank
    return [{"net": OrderedDict(weight=piece[rank]), "own": own[rank], "step": torch.tensor(rank)} for rank in range(count)]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_pieces_make_up_the_whole(count: int, dim: int) -> None:
    base = count - 1
    whole = put_together_whole(states_of(WEIGHT, count, dim), base)
    assert torch.equal(whole["net"]["weight"], WEIGHT)
    assert type(whole["net"]) is OrderedDict
    assert whole["own"] == [base] * base
    assert whole["step"] == base


def test_what_is_put_together_shares_no_memory_with_the_pieces() -> None:
    states = states_of(WEIGHT.clone(), 1, 0)
    whole = put_together_whole(states)
    whole["net"]["weight"] += 1
    whole["step"] += 1
    assert torch.equal(states[0]["net"]["weight"]["lightning_ft.piece"], WEIGHT)
    assert states[0]["step"] == 0


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("count", range(1, 6))
def test_ranks_hold_the_rows_that_torch_gives_them(length: int, count: int) -> None:
    chunks = torch.arange(length).chunk(count)
    rows = [chunk.tolist() for chunk in chunks] + [[]] * (count - len(chunks))
    assert [list(range(*chunk_bounds(length, index, count))) for index in range(count)] == rows
