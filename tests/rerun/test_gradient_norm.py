import math

import pytest
import torch
from torch import nn

from lightning_ft.rerun.gradient_norm import TotalNorm, gradient_norm, in_pieces, norm_of


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_norm_is_the_same_in_any_order_and_by_pieces(dtype):
    gradients = [torch.randn(size, dtype=dtype) for size in (300_000, 7, 131_072, 0)]
    orders = [gradients, gradients[::-1], [piece for gradient in gradients for (piece,) in in_pieces(gradient)]]
    totals = [TotalNorm() for _ in orders]
    for total, order in zip(totals, orders, strict=True):
        for gradient in order:
            total.add(gradient)
    norms = {float(total.value) for total in totals}
    assert norms == {float(TotalNorm(totals[:1]).value)}
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert norms.pop() == pytest.approx(float(torch.cat(gradients).to(wide).norm()), rel=1e-4)


@pytest.mark.parametrize("index", [0, 131_071, 131_072, 299_999])
@pytest.mark.parametrize("value", [3e30, -math.inf, math.nan])
def test_norm_by_pieces_tells_of_every_element_whether_it_is_finite(index, value):
    parameter = nn.Parameter(torch.zeros(300_000))
    parameter.grad = torch.ones(300_000)
    parameter.grad[index] = value
    assert float(gradient_norm([parameter])) == pytest.approx(abs(value), nan_ok=True)


def test_norm_beyond_double_precision_is_infinite():
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 1.3e154, dtype=torch.float64)
    assert math.isinf(gradient_norm(parameters))
    assert gradient_norm([]) is None
