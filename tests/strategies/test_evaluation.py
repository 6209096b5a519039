from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from lightning_ft.strategies.evaluation import EvaluationShards
from lightning_ft.testing import Fault, FaultPlan

NO_LOOP = SimpleNamespace(
    fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(_combined_loader=None, _max_batches=[])))
)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 4)])
def test_sampler_that_follows_is_the_one_that_would_be_made_anew(rank, world_size, drop_last):
    dataset = list(range(23))
    sampler = DistributedSampler(dataset, num_replicas=3, rank=1, shuffle=False, drop_last=drop_last)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    shards = EvaluationShards()
    shards.add(loader)
    shards.follow(NO_LOOP, rank, world_size)
    fresh = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False, drop_last=drop_last)
    assert list(sampler) == list(fresh)
    assert len(loader) == len(DataLoader(dataset, batch_size=4, sampler=fresh))


def test_prediction_shards_stay_unrepeated():
    dataset = list(range(10))
    sampler = UnrepeatedDistributedSamplerWrapper(SequentialSampler(dataset), num_replicas=3, rank=0, shuffle=False)
    shards = EvaluationShards()
    shards.add(DataLoader(dataset, sampler=sampler))
    seen = []
    for rank in range(4):
        shards.follow(NO_LOOP, rank, 4)
        assert len(sampler) == len(list(sampler))
        seen += list(sampler)
    assert sorted(seen) == dataset


def test_pass_under_way_keeps_its_shards():
    sampler = DistributedSampler(list(range(12)), num_replicas=3, rank=2, shuffle=False)
    shards = EvaluationShards()
    shards.add(SimpleNamespace(sampler=sampler))
    under_way = iter(sampler)
    first = next(under_way)
    shards.follow(NO_LOOP, 0, 2)
    assert [first, *under_way] == [2, 5, 8, 11]


def test_values_of_validation_and_test_are_those_without_deaths(train: Callable[..., Any]) -> None:
    options = {"model": "GathersInValidation", "num_validation_samples": 60, "max_epochs": 1, "calls": ["fit", "test"]}
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="validation_batch", occurrence=1),
            Fault(kind="kill", slot=0, point="test_batch", occurrence=2),
        ]
    )
    whole = train(name="whole", devices=4, **options)
    training = train(plan, devices=4, ft={"max_restarts": 0}, **options)
    training.assert_went_on(plan, max_epochs=1)
    assert set(training.results) == {2, 3}
    for result in training.results.values():
        for name in ("val_loss", "val_error", "largest"):
            assert result["callback_metrics"][name] == pytest.approx(whole.results[2]["callback_metrics"][name], rel=1e-5)
        assert result["test"][0] == pytest.approx(whole.results[2]["test"][0], rel=1e-5)
    assert {(event["stage"], *event["slots"]) for event in training.of("incomplete")} == {("train", 1)}
