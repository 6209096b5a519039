from pathlib import Path

import pytest
import torch

from lightning_ft.checkpoint.rank_section import parse_section, read_section, section_bytes
from lightning_ft.errors import MalformedStateError

STATE = {
    "rank": 1,
    "state": {
        "random": torch.arange(7, dtype=torch.uint8),
        "words": (3, [1, 2], None),
        "raw": b"\0x",
        "empty": torch.zeros(0),
    },
}


def test_a_section_comes_back_with_its_types(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.state").write_bytes(section_bytes(STATE))
    state = read_section(tmp_path, 1)
    assert state is not None
    assert torch.equal(state["state"].pop("random"), torch.arange(7, dtype=torch.uint8))
    assert state["state"].pop("empty").shape == (0,)
    assert state == {"rank": 1, "state": {"words": (3, [1, 2], None), "raw": b"\0x"}}
    assert read_section(tmp_path, 0) is None


def test_a_section_cut_off_anywhere_is_noticed() -> None:
    data = section_bytes(STATE)
    for length in range(0, len(data), 7):
        with pytest.raises(MalformedStateError, match=r"."):
            parse_section(data[:length])
    with pytest.raises(MalformedStateError, match="length"):
        parse_section(data + b"x")
