import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.engine import SoloEngine
from lightning_ft.elastic.gathering import gather_with_gradients
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.rerun.gradient_norm import TotalNorm, gradient_norm
from lightning_ft.strategies.buckets import make_buckets, write_back
from lightning_ft.strategies.reduction import GradientReducer
from lightning_ft.testing import run_ranks


def test_buckets_hold_every_parameter_once_last_ones_first_and_one_dtype_each():
    module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10).double(), nn.Linear(10, 10), nn.Linear(10, 10).double())
    buckets = make_buckets(list(module.parameters()), bucket_bytes=600, num_flags=9)
    names = {parameter: name for name, parameter in module.named_parameters()}
    filled = [[names[parameter] for parameter in bucket.parameters] for bucket in buckets]
    assert filled == [["3.bias", "3.weight"], ["2.bias", "2.weight", "0.bias", "0.weight"], ["1.bias", "1.weight"]]
    assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in buckets)
    assert [bucket.flags.numel() for bucket in buckets] == [0, 0, 9]


def test_bucket_scales_a_gradient_and_takes_none_for_zero():
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    first.grad = torch.arange(6.0).view(2, 3)
    (bucket,) = make_buckets([first, second], bucket_bytes=100, num_flags=3)
    bucket.fill(0.5)
    assert dict(zip(bucket.parameters, map(torch.Tensor.tolist, bucket.views), strict=True)) == {
        first: [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]],
        second: [0.0, 0.0, 0.0],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_norms_that_are_measured_meanwhile_are_those_of_gradients_and_change_nothing_of_what_is_copied(dtype):
    shapes = [(3,), (500, 700), (70, 3, 30, 30), (1,), (0, 2), (131072,)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters[1:]:  # the first one has none
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
    parameters[2].grad = parameters[2].grad.to(memory_format=torch.channels_last)
    parameters[1].grad.requires_grad_()  # as with `create_graph=True`
    plain, measured = (make_buckets(parameters, bucket_bytes=1 << 30, num_flags=7)[0] for _ in range(2))
    own, none = TotalNorm(), TotalNorm()
    plain.fill(1 / 3)
    measured.fill(1 / 3, own)
    assert torch.equal(plain.flat, measured.flat)
    assert torch.equal(own.value, gradient_norm(parameters))
    parameters[0].grad = torch.ones(3, dtype=dtype)
    average = TotalNorm()
    write_back([parameter.grad for parameter in measured.parameters], measured.views, average)
    for parameter, view in zip(plain.parameters, plain.views, strict=True):
        assert torch.equal(parameter.grad, view)
    assert torch.equal(average.value, gradient_norm(parameters))
    measured.fill(0.0, none)  # nothing of this rank is in it
    assert none.value is None
    assert not measured.gradients.any()


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


class SharedBlock(nn.Module):
    """Uses one block twice, checkpointed, so that backward adds to its parameters twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x).square().mean()


def reduce_shared_block(engine: LocalEngine) -> list:
    module = SharedBlock()
    reducer = GradientReducer(module.parameters(), engine, bucket_bytes=1)
    gradients = []
    for step in range(3):
        module.zero_grad()
        reducer.arm(1, 1, stop=False)
        module(torch.full((2, 4), 1.0 + engine.rank + step)).backward()
        reducer.finish()
        gradients.append([parameter.grad.tolist() for parameter in module.parameters()])
        engine.report_progress(step + 1)
    return gradients


def test_block_that_is_used_twice_under_reentrant_checkpointing_is_reduced_whole():
    results = run_ranks(reduce_shared_block, 2)
    assert results[0] == results[1]
    module = SharedBlock()
    for step in range(3):
        module.zero_grad()
        for rank in range(2):
            (module(torch.full((2, 4), 1.0 + rank + step)) / 2).backward()
        for parameter, reduced in zip(module.parameters(), results[0][step], strict=True):
            torch.testing.assert_close(parameter.grad, torch.tensor(reduced))


def use_a_layer_more_often(engine: LocalEngine) -> list:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    parameters = [*first.parameters(), *last.parameters()]
    reducer = GradientReducer(parameters, engine, bucket_bytes=1)
    gradients, own, average = [], [], []
    reducer.while_reducing = lambda norm: own.append((norm_of_all(parameters), norm if norm is None else float(norm)))
    for step, uses in enumerate([(1, 1), (1, 2), (3, 1)]):  # by rank
        for parameter in parameters:
            parameter.grad = None
        reducer.arm(1, 1, stop=False)
        for _ in range(uses[engine.rank]):
            last(first(torch.full((2, 4), 1.0 + engine.rank + step))).square().mean().backward()
        reducer.finish()
        average.append(float(reducer.average_norm.take(parameters)))
        gradients.append([parameter.grad.tolist() for parameter in parameters])
        engine.report_progress(step + 1)
    return [gradients, average, own]


def norm_of_all(parameters: list[nn.Parameter]) -> float:
    return float(torch.stack([parameter.grad.norm() for parameter in parameters]).norm())


def test_gradient_that_one_rank_adds_to_after_its_reduction_had_begun_is_reduced_again_on_all():
    results = run_ranks(use_a_layer_more_often, 2)
    assert results[0][:2] == results[1][:2]
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    parameters = [*first.parameters(), *last.parameters()]
    for step, uses in enumerate([(1, 1), (1, 2), (3, 1)]):
        own = []
        for rank in range(2):
            first.zero_grad()
            last.zero_grad()
            for _ in range(uses[rank]):
                last(first(torch.full((2, 4), 1.0 + rank + step))).square().mean().backward()
            own.append([parameter.grad for parameter in parameters])
            looked_at, told = results[rank][2][step]  # before it was averaged, and once
            assert looked_at == pytest.approx(norm_of_all(parameters))
            assert told == (None if uses[rank] > 1 else pytest.approx(looked_at))  # what was sent too early is not all
        for parameter, reduced, one, other in zip(parameters, results[0][0][step], *own, strict=True):
            parameter.grad = (one + other) / 2
            torch.testing.assert_close(parameter.grad, torch.tensor(reduced))
        assert results[0][1][step] == pytest.approx(norm_of_all(parameters))
    assert [len(looks) for _, _, looks in results] == [3, 3]


def use_a_layer_now_and_then(engine: LocalEngine) -> list:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)])
    reducer = GradientReducer(layers.parameters(), engine, bucket_bytes=1)
    reducer.while_reducing = lambda norm: None
    told = []
    for step, used in enumerate([(0, 2), (0, 1, 2), (0, 2), (0, 1, 2) if engine.rank else (0, 2)]):
        layers.zero_grad()
        reducer.arm(1, 1, stop=False)
        x = torch.full((2, 4), 1.0 + engine.rank)
        for number in used:
            x = layers[number](x)
        x.sum().backward()
        unused = reducer.finish().unused
        told.append([[layer.weight.grad is not None, layer.weight in unused] for layer in layers])
        told[-1].append(reducer.average_norm.take(layers.parameters()) is not None)
        engine.report_progress(step + 1)
    return [told, [layer.weight.grad.tolist() for layer in layers]]


def test_layer_that_some_steps_or_some_ranks_do_not_use_has_a_gradient_where_any_rank_has_one():
    results = run_ranks(use_a_layer_now_and_then, 2)
    assert results[0] == results[1]
    used, unused, unused_by_one = [True, False], [False, True], [True, True]
    # The norm is known if the gradients are what was averaged, and no others.
    assert results[0][0] == [
        [used, unused, used, False],
        [used, used, used, True],
        [used, unused, used, False],
        [used, unused_by_one, used, True],
    ]


def freeze_and_add(engine: LocalEngine | None) -> list:
    """Gradients of a module whose trainable parameters change; without an engine the mean over two ranks, in one process."""
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    module[0].requires_grad_(False)
    reducer = GradientReducer(module.parameters(), engine or SoloEngine(), bucket_bytes=1)
    gradients = []
    for step in range(6):
        module[0].requires_grad_(step > 0)
        module[1].requires_grad_(step % 2 == 0)
        if step == 2:
            module.append(nn.Linear(4, 4))
        module.zero_grad()
        reducer.follow(module.parameters())
        reducer.arm(1, 1, stop=False)
        for rank in (0, 1) if engine is None else (engine.rank,):
            x = torch.full((2, 4), 1.0 + rank)
            for layer in module:
                x = layer(x).tanh()
            (x.sum() / (2 if engine is None else 1)).backward()
        reducer.finish()
        gradients.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
        if engine is not None:
            engine.report_progress(step + 1)
    return gradients


def test_what_requires_a_gradient_now_is_averaged_now():
    results = run_ranks(freeze_and_add, 2)
    assert results[0] == results[1]
    for ours, expected in zip(results[0], freeze_and_add(None), strict=True):
        assert [gradient is None for gradient in ours] == [gradient is None for gradient in expected]
        for mine, other in zip(ours, expected, strict=True):
            if mine is not None:
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(other))


def reduce_without_anybody_who_counts(engine: LocalEngine) -> list:
    layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(4)])
    layers[3].weight.grad = torch.ones(1, 2)
    rows = nn.Embedding(3, 2, sparse=True)
    reducer = GradientReducer([*layers.parameters(), rows.weight], engine, sparse={rows.weight})
    reducer.arm(0, 1, stop=False)
    with reducer.ghost_backward():
        for number in ((0, 3), (0, 1))[engine.rank]:
            (layers[number](rows(torch.tensor([1]))) * float("nan")).sum().backward()
    reducer.finish()
    torch.optim.SparseAdam([rows.weight]).step()
    engine.report_progress(1)
    return [None if layer.weight.grad is None else layer.weight.grad.tolist() for layer in layers]


def test_where_nobody_is_left_who_counts_gradients_are_zero_and_what_was_accumulated_stays():
    zero = [[0.0, 0.0]]
    assert run_ranks(reduce_without_anybody_who_counts, 2) == [[zero, zero, None, [[1.0, 1.0]]]] * 2


def gather_after_buckets_are_sent(engine: LocalEngine | None) -> list:
    """Gradients of a module whose backward pass calls a collective from step 2 on, when later layers' are on their way."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    reducer = GradientReducer(layers.parameters(), engine or SoloEngine(), bucket_bytes=1)
    gradients = []
    for step in range(4):
        layers.zero_grad()
        reducer.arm(1, 1, stop=False)
        ranks = (0, 1) if engine is None else (engine.rank,)
        hidden = [layers[0](torch.full((1, 4), 1.0 + rank)) for rank in ranks]
        for own in hidden:
            x = own
            if step > 1:
                x = x + (torch.stack(hidden) if engine is None else gather_with_gradients(own, Collectives(engine))).prod(0)
            for layer in list(layers)[1:]:
                x = layer(x).tanh()
            (x.sum() / (2 if engine is None else 1)).backward(retain_graph=True)
        reducer.finish()
        gradients.append([parameter.grad.tolist() for parameter in layers.parameters()])
        if engine is not None:
            engine.report_progress(step + 1)
    return gradients


def test_buckets_that_were_sent_before_a_first_collective_inside_backward_are_sent_again():
    results = run_ranks(gather_after_buckets_are_sent, 2)
    assert results[0] == results[1]
    expected = gather_after_buckets_are_sent(None)
    for ours, reference in zip(results[0], expected, strict=True):
        for mine, other in zip(ours, reference, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other))
