import pytest
import torch
from torch import nn

from lightning_ft.strategies.average_norm import AverageNorm


def averaged() -> tuple[AverageNorm, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    norm = AverageNorm()
    norm.total.add(torch.tensor([9.0]))
    norm.forget()  # averaged anew
    norm.total.add(torch.tensor([1.0, 2.0]))
    norm.total.add(torch.tensor([2.0]))
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([2.0])
    norm.is_of(parameters[:2])
    return norm, parameters


def test_norm_is_that_of_all_messages_and_told_once():
    norm, parameters = averaged()
    assert float(norm.take(parameters)) == pytest.approx(3.0)
    assert norm.take(parameters) is None


@pytest.mark.parametrize("change", ["in place", "replaced", "removed", "added", "begun anew"])
def test_norm_is_not_known_of_gradients_that_are_not_what_was_averaged(change):
    norm, parameters = averaged()
    if change == "in place":
        parameters[0].grad.nan_to_num_()
    elif change == "replaced":
        parameters[0].grad = parameters[0].grad.clone()
    elif change == "removed":
        parameters[0].grad = None
    elif change == "added":
        parameters[2].grad = torch.ones(3)
    else:
        norm.forget()
    assert norm.take(parameters) is None


def test_norm_is_not_known_if_a_parameter_was_averaged_in_another_way():
    norm, parameters = averaged()
    parameters[1].grad = torch.ones(1).to_sparse()
    norm.is_of(parameters[:2])
    assert norm.take(parameters) is None
