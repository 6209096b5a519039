"""Replicas of several ranks: who dies takes its replica out of the step, and what is left becomes replicas again."""

from typing import Any

import pytest
import torch

from lightning_ft.testing import run_ranks
from tests.elastic.jobs.sharded_training import train, train_in_one_process


def check_against_one_process(results: list[Any]) -> list[list[int]]:
    """Return the slots of each step, after all that took part to the end are found to hold what one process computes."""
    (first, *others) = [result for result in results if result is not None]
    for other in others:
        assert [other[name] for name in ("members", "norms", "weights")] == [
            first[name] for name in ("members", "norms", "weights")
        ]
    norms, weights = train_in_one_process(first["members"])
    torch.testing.assert_close(first["norms"], norms, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close([torch.tensor(weight) for weight in first["weights"]], [w.detach() for w in weights])
    members: list[list[int]] = first["members"]
    return members


def test_a_death_takes_its_replica_out_of_the_step_and_both_ranks_come_back_as_one() -> None:
    results = run_ranks(train, 4, args=[8, 2, {"3": [1]}], shard_size=2, max_restarts=1)
    members = check_against_one_process(results)
    assert members[:4] == [[0, 1, 2, 3]] * 3 + [[2, 3]]
    assert [result["replica"] for result in results] == [[1, 0, 0, 1], [1, 1, 0, 1], [0, 0, 2, 3], [0, 1, 2, 3]]
    assert [result["rank"] for result in results] == [0, 1, 0, 1]


@pytest.mark.parametrize(("num_ranks", "left"), [(6, [1, 2, 4, 5]), (4, [1, 2])])
def test_the_mates_of_the_dead_become_a_replica_and_complete_the_same_step(num_ranks: int, left: list[int]) -> None:
    results = run_ranks(train, num_ranks, args=[6, 0, {"3": [0, 3]}], shard_size=2)
    members = check_against_one_process(results)
    assert members == [list(range(num_ranks))] * 3 + [left] * 3
    assert results[1]["replica"][1:] == [1, 2, 1]
