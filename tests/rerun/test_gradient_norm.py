import math

import pytest
import torch
from torch import nn

from lightning_ft.rerun.gradient_norm import gradient_norm, norm_of


@pytest.mark.parametrize(
    ("values", "dtype", "norm"),
    [
        ([3.0, 4.0], torch.float32, 5.0),
        ([3.0e30, -4.0e30], torch.float32, 5.0e30),  # whose squares are not finite
        ([3.0e30, -4.0e30], torch.bfloat16, 5.0e30),
        ([300.0, 400.0], torch.float16, 500.0),
        ([3.0e20j, 4.0e20], torch.complex64, 5.0e20),
        ([1.0, math.inf], torch.float32, math.inf),
        ([], torch.float32, 0.0),
    ],
)
def test_norm_is_finite_if_all_values_are(values, dtype, norm):
    assert float(norm_of(torch.tensor(values, dtype=dtype))) == pytest.approx(norm, rel=1e-2)


def test_a_value_that_is_none_makes_the_norm_none():
    assert math.isnan(norm_of(torch.tensor([1.0, math.nan, math.inf])))


def test_norm_of_all_gradients_is_that_of_the_largest_ones():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0e30, 0.0]), torch.tensor([0.0, 4.0e30]).to_sparse()
    assert float(gradient_norm(parameters)) == pytest.approx(5.0e30)
