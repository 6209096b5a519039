import pytest
import torch
from torch import nn

from lightning_ft.rerun.replica_state import NUMBERS, combined, differing, digests, named_state, sum_of_bits, vote


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())
    module[1].weight = nn.Parameter(torch.randn(4, 2).bfloat16().T)  # not contiguous
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer


def test_every_bit_of_the_state_is_in_the_checksum_of_its_own_name():
    module, optimizer = trained()
    tensors, numbers = named_state(module, [optimizer])
    assert {"0.weight", "1.bias", "optimizer 0, exp_avg of 1.weight", "optimizer 0, step of 0.bias"} <= tensors.keys()
    assert numbers["optimizer 0, group 0, lr"] == 0.1
    before = digests(tensors, numbers)
    for name, tensor in tensors.items():
        bits = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        index = (-1,) * bits.dim()
        for bit in (0, 7, 13):
            sums = sum_of_bits(tensor)
            bits[index] ^= 1 << bit
            after = digests(*named_state(module, [optimizer]))
            assert differing(before, after) == [name]
            assert combined(before) != combined(after)
            assert sum_of_bits(tensor) != sums  # what is taken on a device
            bits[index] ^= 1 << bit
    assert digests(*named_state(module, [optimizer])) == before
    optimizer.param_groups[0]["lr"] = 0.2
    assert differing(before, digests(*named_state(module, [optimizer]))) == [NUMBERS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.int8, torch.bool])
def test_all_dtypes_have_a_checksum(dtype):
    tensors = {
        "full": torch.ones(5, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones(0, dtype=dtype),
    }
    assert len(digests(tensors, {})) == 4
    assert sum_of_bits(tensors["full"]) == 5 * sum_of_bits(tensors["scalar"]) != 0


def test_the_minority_is_wrong_and_a_tie_is_undecided():
    assert vote({0: (0, "a"), 1: (0, "a"), 2: (0, "a")}).is_unanimous
    assert vote({3: (0, "a")}).is_unanimous
    assert vote({}).is_unanimous
    verdict = vote({0: (0, "b"), 1: (0, "a"), 2: (0, "a")})
    assert (verdict.right, verdict.wrong, verdict.undecided) == ({0: (1, 2)}, (0,), ())
    verdict = vote({0: (0, "b"), 1: (0, "a"), 2: (0, "a"), 3: (0, "c"), 4: (0, "a")})
    assert (verdict.right, verdict.wrong) == ({0: (1, 2, 4)}, (0, 3))
    for rows in (
        {0: "a", 1: "b"},
        {0: "a", 1: "a", 2: "b", 3: "b"},
        {0: "a", 1: "a", 2: "b", 3: "c"},
        {0: "a", 1: "b", 2: "c"},
    ):
        verdict = vote({slot: (0, held) for slot, held in rows.items()})
        assert (verdict.right, verdict.wrong, verdict.undecided) == ({}, (), tuple(rows))


def test_each_shard_is_compared_with_its_like():
    rows = {0: (0, "a"), 1: (1, "x"), 2: (0, "a"), 3: (1, "y"), 4: (0, "a"), 5: (1, "y")}
    verdict = vote(rows)
    assert (verdict.right, verdict.wrong, verdict.undecided) == ({0: (0, 2, 4), 1: (3, 5)}, (1,), ())
