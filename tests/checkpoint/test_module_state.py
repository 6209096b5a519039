import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_ft.checkpoint.module_state import changing, state_of, unwrapped
from lightning_ft.checkpoint.plan import Flat


class Compiled(nn.Module):
    """What `torch.compile` returns, as far as names go."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_names_are_those_of_the_module_however_it_is_wrapped() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(plain.state_dict())
    inner = nn.Sequential(checkpoint_wrapper(plain[0]), Compiled(plain[1]))
    wrapped = nn.DataParallel(Compiled(inner))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    plain(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    assert unwrapped(wrapped) is inner
    state = state_of(wrapped, [optimizer])
    assert list(state["state_dict"]) == names
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(state["optimizer_0"]["state"]) == parameters
    assert state["optimizer_0"]["param_groups"][0]["params"] == parameters
    may_change = changing(wrapped)
    tensors = {name: leaf for name, leaf in Flat.of(state).leaves.items() if isinstance(leaf, torch.Tensor)}
    changing_ones = [name for name, tensor in tensors.items() if may_change(name, tensor)]
    assert changing_ones == [*(f"state_dict.{name}" for name in names[4:]), "optimizer_0.param_groups.0.lr"]


def test_a_parameter_that_the_module_has_not_can_not_be_saved() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="SGD has a parameter that is none of the module's"):
        state_of(nn.Linear(1, 1), [optimizer])
