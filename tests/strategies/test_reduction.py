import pytest
import torch
from torch import nn

from lightning_ft.elastic.engine import SoloEngine
from lightning_ft.strategies.reduction import GradientReducer, _make_buckets


def test_buckets_hold_every_parameter_once_last_ones_first_and_one_dtype_each():
    module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10).double(), nn.Linear(10, 10), nn.Linear(10, 10).double())
    buckets = _make_buckets(list(module.parameters()), bucket_bytes=600)
    names = {parameter: name for name, parameter in module.named_parameters()}
    filled = [[names[parameter] for parameter in bucket.parameters] for bucket in buckets]
    assert filled == [["3.bias", "3.weight"], ["2.bias", "2.weight", "0.bias", "0.weight"], ["1.bias", "1.weight"]]
    assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in buckets)
    assert [bucket.flags.numel() for bucket in buckets] == [0, 0, 8]


def test_bucket_scales_a_gradient_and_takes_none_for_zero():
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    first.grad = torch.arange(6.0).view(2, 3)
    (bucket,) = _make_buckets([first, second], bucket_bytes=100)
    bucket.fill(0.5)
    assert dict(zip(bucket.parameters, map(torch.Tensor.tolist, bucket.views), strict=True)) == {
        first: [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]],
        second: [0.0, 0.0, 0.0],
    }


@pytest.mark.parametrize("num_steps", [1, 3])
def test_gradients_of_one_process_are_left_as_they_are(num_steps):
    module = nn.Linear(3, 2)
    reducer = GradientReducer(module.parameters(), SoloEngine())
    for _ in range(num_steps):
        module.zero_grad()
        reducer.arm(1, 1, stop=False)
        module(torch.ones(4, 3)).sum().backward()
        reduced = reducer.finish()
        assert (reduced.members, reduced.join, reduced.stop) == ((0,), False, False)
        assert module.weight.grad.tolist() == [[4.0] * 3] * 2
    reducer.close()
    reducer.close()
