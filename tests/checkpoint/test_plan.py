from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft.checkpoint.commit import Post, Table
from lightning_ft.checkpoint.layout import FileEntry
from lightning_ft.checkpoint.plan import Flat, Seat, describe, divide


def state(sizes: list[int]) -> dict[str, Any]:
    tensors = {f"w{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    return {"state_dict": tensors, "optimizer_0": {"param_groups": [{"lr": 0.1}]}}


@given(sizes=st.lists(st.integers(0, 1000), max_size=30), world_size=st.integers(1, 7), differing=st.booleans())
def test_every_tensor_is_written_once_and_nobody_writes_much_more_than_others(
    sizes: list[int], world_size: int, differing: bool
) -> None:
    flat = Flat.of(state(sizes))
    names = {"state_dict.w0"} if differing else set()
    shares = [divide(flat, Seat(rank, world_size), names) for rank in range(world_size)]
    written = Counter(entry.name for share in shares for entry in share)
    assert written == Counter(f"state_dict.w{number}" for number in range(len(sizes)))
    assert not (names & written.keys()) or any(entry.name in names for entry in shares[0])
    if not differing:
        loads = [sum(entry.nbytes for entry in share) for share in shares]
        assert max(loads) - min(loads) <= max([4 * size for size in sizes], default=0)


def test_a_plan_depends_on_shapes_and_types_and_not_on_values() -> None:
    first, second = Flat.of(state([3, 4])), Flat.of(state([3, 4]))
    second.leaves["state_dict.w0"].fill_(1)
    second.leaves["optimizer_0.param_groups.0.lr"] = 0.2
    assert first.signature() == second.signature()
    assert first.signature() != Flat.of(state([3, 5])).signature()
    assert first.signature() != Flat.of({**state([3, 4]), "extra": {}, "more": torch.zeros(1)}).signature()


def test_what_ranks_post_is_read_as_it_was_written() -> None:
    entries = tuple(divide(Flat.of({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())}), Seat(0, 1)))
    table = Table("__0_0.distcp", entries, ((0, 100), (128, 90)))
    assert Table.from_bytes(table.to_bytes()) == table
    post = Post((FileEntry("a", 1, "0" * 16),), "key", (("optimizer_0.param_groups.0.lr", 5, 6),), None)
    assert Post.from_bytes(post.to_bytes()) == post
    assert describe(entries, ["lr"]).keys() == {"a", "b", "lr"}
