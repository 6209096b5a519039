import copy

import pytest
import torch
from torch import nn

from lightning_ft.strategies import state_digest as module
from lightning_ft.strategies.state_digest import state_digest


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("max_bytes", [1 << 26, 1 << 13])
def test_a_digest_tells_a_bit_of_a_parameter_and_of_an_optimizers_state(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", max_bytes)
    model, optimizer = trained()
    before = state_digest(model.parameters(), [optimizer])
    assert before == state_digest(*(lambda model, optimizer: (model.parameters(), [optimizer]))(*trained()))
    state = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-7
    changed = state_digest(model.parameters(), [optimizer])
    optimizer.state[model[1].bias]["exp_avg"] += 1e-7
    assert len({before, changed, state_digest(model.parameters(), [optimizer])}) == 3
    optimizer.load_state_dict(state)
    assert state_digest(model.parameters(), [optimizer]) == changed


def test_numbers_of_any_type_and_shape_have_a_digest() -> None:
    tensors = [torch.zeros(3, dtype=torch.bfloat16), torch.tensor(1.0), torch.zeros(0), torch.zeros(4, 2).t()]
    assert state_digest(tensors, []) != state_digest([tensors[0], torch.tensor(2.0), *tensors[2:]], [])
