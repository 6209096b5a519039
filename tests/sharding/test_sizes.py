import torch
from torch import nn

from lightning_ft import FTStrategy
from lightning_ft.sharding.sizes import fewest_ranks, training_bytes

GIB = 1 << 30


def test_as_few_ranks_as_the_memory_allows_hold_a_copy() -> None:
    assert [fewest_ranks(size * GIB, 80 * GIB, 8) for size in (1, 56, 57, 112, 113, 400, 5000)] == [1, 1, 2, 2, 4, 8, 8]
    assert fewest_ranks(100 * GIB, 80 * GIB, 3) == 3


def test_state_is_counted_for_what_is_trained() -> None:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False, dtype=torch.bfloat16))
    module[1].requires_grad_(False)
    assert training_bytes(module) == 4 * 400 + 200


def test_a_plan_can_be_read() -> None:
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)), nn.Linear(1024, 3))
    assert FTStrategy(2).describe(module).splitlines() == [
        "unit    module      parameters  gathered   a rank",
        "0       Linear       1,049,600   4.0 MiB  2.0 MiB",
        "1       Linear       1,049,600   4.0 MiB  2.0 MiB",
        "(root)  Sequential       3,075  12.0 KiB  6.0 KiB",
        "With gradients and the state of Adam a rank holds 16.0 MiB of 2 shards.",
    ]
    assert "of 4 shards" in FTStrategy("all").describe(module, devices=4)
