import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ft.rerun.gradient_norm import TotalNorm, gradient_norm, norm_of


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
def test_norm_is_the_same_in_any_order_and_while_copying(dtype):
    gradients = [torch.randn(size, dtype=dtype) for size in (300_000, 7, 131_072, 0)]
    one, other, copying, scaling = totals = [TotalNorm() for _ in range(4)]
    for gradient in gradients:
        one.add(gradient)
        copy, scaled = torch.empty_like(gradient), torch.empty_like(gradient)
        copying.copy_and_add(gradient, copy)
        scaling.add_and_scale(gradient, 1 / 3, scaled)
        assert torch.equal(copy, gradient)
        assert torch.equal(scaled, gradient * (1 / 3))
    for gradient in gradients[::-1]:
        other.add(gradient)
    norms = {float(total.value) for total in totals}
    assert norms == {float(TotalNorm([one]).value)}
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert norms.pop() == pytest.approx(float(torch.cat(gradients).to(wide).norm()), rel=1e-4)


@pytest.mark.parametrize("value", [3e30, -math.inf, math.nan])
def test_copies_have_every_value_without_a_word(value):
    values = torch.full((3,), value)
    values.view(torch.int32)[1] = 0x7F800001  # a NaN that signals
    own, out = TotalNorm(), torch.empty(3)
    with np.errstate(all="raise"):
        own.add_and_scale(values, 0.5, out)
    assert torch.equal(out.nan_to_num(), (values * 0.5).nan_to_num())
    assert math.isnan(own.value)


def test_views_that_memory_does_not_hold_as_they_are_have_their_own_values():
    numbers = torch.tensor([3.0 + 4.0j, 6.0 - 8.0j])
    negative, strided = numbers.conj().imag, torch.arange(6.0)[::2]
    for tensor in (negative, strided, nn.Parameter(strided)):
        scaling, copying, scaled, copy = TotalNorm(), TotalNorm(), torch.empty(tensor.shape), torch.empty(tensor.shape)
        scaling.add_and_scale(tensor, 2.0, scaled)
        copying.copy_and_add(tensor, copy)
        assert torch.equal(copy, tensor)
        assert torch.equal(scaled, tensor * 2.0)
        expected = pytest.approx(float(tensor.detach().norm()))
        assert (float(scaling.value), float(copying.value)) == (expected, expected)


@pytest.mark.parametrize("index", [0, 65_535, 65_536, 299_999])
@pytest.mark.parametrize("value", [3e30, -math.inf, math.nan])
def test_norm_by_pieces_tells_of_every_element_whether_it_is_finite(index, value):
    parameter = nn.Parameter(torch.zeros(300_000))
    parameter.grad = torch.ones(300_000)
    parameter.grad[index] = value
    assert float(gradient_norm([parameter])) == pytest.approx(abs(value), nan_ok=True)


@pytest.mark.parametrize("value", [1.3e154, 1e200])
def test_norm_beyond_double_precision_is_infinite(value):
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), value, dtype=torch.float64)
    assert math.isinf(gradient_norm(parameters))
    assert gradient_norm([]) is None
