import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.checkpoint import load_sharded
from lightning_ft.checkpoint.dcp_reading import read_flat
from lightning_ft.errors import MalformedStateError
from lightning_ft.testing import run_without_supervisor

SCRIPT = Path(__file__).parent / "jobs" / "sharded.py"


def test_what_one_rank_saved_is_sharded_over_three_and_put_together_again(save: Callable[..., Path], tmp_path: Path) -> None:
    directory = save()
    place = tmp_path / "sharded"
    place.mkdir()
    run_without_supervisor(SCRIPT, [str(directory)], num_ranks=3, directory=place).check()
    for rank in range(3):
        result = json.loads((place / f"result_{rank}.json").read_text())
        assert (result["rows"], result["lr"]) == (40, [0.1, 0.001])
        assert "2.weight is (120, 160) in the checkpoint and (121, 160) in the module" in result["refused"]
        assert result["untouched"]
    whole, again = read_flat(directory), read_flat(place / "again")
    assert again.keys() == {path for path in whole if path[0] != "extra"}
    for path, value in again.items():
        assert torch.equal(value, whole[path]) if isinstance(value, torch.Tensor) else value == whole[path], path


def test_plain_modules_take_theirs_and_what_does_not_fit_is_named(
    save: Callable[..., Path], checkpoint: dict[str, Any]
) -> None:
    directory = save()
    model = torch.nn.Sequential(torch.nn.Linear(8, 160), torch.nn.BatchNorm1d(160), torch.nn.Linear(160, 120))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MalformedStateError, match="no state of optimizer 1"):
        load_sharded(model, [optimizer, optimizer], directory)
    load_sharded(model, None, directory)
    assert all(torch.equal(value, checkpoint["state_dict"][name]) for name, value in model.state_dict().items())
    with pytest.raises(MalformedStateError, match=r"lacks \['3.weight'\] and has \['2.bias', '2.weight'\]"):
        load_sharded(torch.nn.Sequential(*model[:2], torch.nn.Identity(), torch.nn.PReLU()), None, directory)
    load_sharded(torch.nn.Sequential(*model[:2]), None, directory, strict=False)
