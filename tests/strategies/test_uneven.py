"""Ranks whose data is a stream of their own, long or short, with batches missing or gradients left out."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ft.events.audit import audit
from lightning_ft.testing import (
    Fault,
    FaultPlan,
    assert_every_ticket_once,
    assert_recovered,
    assert_steps_contiguous,
    assert_used_up,
    assert_weights_equal,
)

MIXED = {"accumulate_grad_batches": 2, "limit_train_batches": 5}


def all_samples(*counts: int) -> Counter[int]:
    return Counter(1000 * rank + index for rank, count in enumerate(counts) for index in range(count))


def check(training: Any, plan: FaultPlan | None = None) -> None:
    training.job.check()
    assert_steps_contiguous(training.events)
    assert_every_ticket_once(training.events)
    assert_weights_equal(*(result["fingerprint"] for result in training.results.values()))
    if plan is not None:
        assert_used_up(plan, training.events)
        assert_recovered(training.events)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("iterable", {"dropout": 0.3, "workers": 1}),
        ("sized", {"dropout": 0.3}),
        ("custom", {"trainer": MIXED, "buffers": True}),
    ],
)
def test_even_streams_train_as_under_ddp(source: str, options: dict[str, Any], train_on_streams: Callable[..., Any]) -> None:
    ours, theirs = (
        train_on_streams(strategy=strategy, devices=2, counts=[24, 24], source=source, **options)
        for strategy in ("FTStrategy", "ddp")
    )
    check(ours)
    assert ours.results == theirs.results


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("joint:max_size_cycle", {"workers": 1, "trainer": {"accumulate_grad_batches": 2}}),
        ("joint:min_size", {"dropout": 0.3}),
        ("joint:max_size", {"trainer": {"limit_train_batches": 4}}),
        ("whole", {"trainer": {"use_distributed_sampler": False}}),
        ("batches", {}),
    ],
)
def test_several_loaders_unsharded_ones_and_batch_samplers_train_as_under_ddp(
    source: str, options: dict[str, Any], train_on_streams: Callable[..., Any]
) -> None:
    ours, theirs = (
        train_on_streams(strategy=strategy, devices=2, counts=[40, 14], source=source, **options)
        for strategy in ("FTStrategy", "ddp")
    )
    check(ours)
    assert ours.results == theirs.results


def test_several_loaders_go_on_where_a_dead_rank_was(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [Fault(kind="kill", slot=1, point="forward", step=2), Fault(kind="kill", slot=0, point="forward", step=7)]
    )
    training = train_on_streams(plan, devices=2, counts=[40, 24], source="joint:max_size_cycle", ft={"min_replicas": 2})
    check(training, plan)
    for epoch in training.trained_samples(2):
        assert Counter(sample for sample in epoch.elements() if sample < 1000) == Counter(range(40))


def test_uneven_streams_are_each_trained_once_whoever_dies(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=2, point="forward", step=2),
            Fault(kind="kill", slot=0, point="train_batch_end", step=5),
            Fault(kind="kill", slot=1, point="backward_early", step=10),
            Fault(kind="kill", slot=2, point="validation_batch", step=9, incarnation=1),
        ]
    )
    training = train_on_streams(plan, counts=[24, 10, 31], ft={"min_replicas": 3}, dropout=0.3, buffers=True)
    check(training, plan)
    assert training.trained_samples(2) == [all_samples(24, 10, 31)] * 2


def test_a_stream_with_a_state_goes_on_from_it_in_a_rank_that_comes_back(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="forward", step=3),
            Fault(kind="kill", slot=0, point="train_batch_end", step=4, occurrence=1),
        ]
    )
    options = {"source": "stateful", "trainer": {"accumulate_grad_batches": 2}, "batch_size": 2}
    training = train_on_streams(plan, counts=[24, 18, 21], ft={"min_replicas": 3}, **options)
    check(training, plan)
    assert training.trained_samples(2) == [all_samples(24, 18, 21)] * 2


def test_streams_with_a_state_go_back_to_it_with_the_only_replica(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="forward", step=3),  # back to the start
            Fault(kind="kill", slot=2, point="forward", step=11),
        ]
    )
    ft = {"shard_size": "all", "supervision": {"lost_streams": "take_over"}}
    training = train_on_streams(plan, counts=[24, 18, 24], source="continuing", batch_size=2, snapshot_every=4, ft=ft)
    training.job.check()
    assert_used_up(plan, training.events)
    assert audit(training.events).problems() == []
    assert training.trained_samples(2) == [all_samples(24, 18, 24)] * 2
    back = {event["step"] for event in training.of("rewound")}
    assert min(back) == 0
    assert max(back) in (8, 9, 10, 11), "of the newest snapshot, or of the return of a rank since"


def test_uneven_streams_in_workers_and_windows_of_accumulation(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="train_batch_end", step=2, occurrence=1)])
    options = {"counts": [12, 7, 29], "workers": 2, "batch_size": 2, "trainer": {"accumulate_grad_batches": 3}}
    training = train_on_streams(plan, ft={"min_replicas": 3}, **options)
    check(training, plan)
    assert training.trained_samples(2) == [all_samples(12, 7, 29)] * 2


def test_a_stream_whose_slot_stays_away_ends_there_and_so_does_the_epoch(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="train_batch_end", step=4)])
    training = train_on_streams(plan, counts=[10, 10, 31], ft={"max_restarts": 0})
    check(training, plan)
    first, second = training.trained_samples(2)
    assert second == all_samples(10, 10)
    assert all_samples(10, 10, 16) - first == Counter()
    assert [(event["epoch"], event["batches"]) for event in training.of("streams_left")] == [
        (0, {"2": None}),
        (1, {"2": None}),
    ]
    # The others had nothing left when it died. A step that does not count ends the epoch as any: validation, schedulers.
    for result in training.results.values():
        assert result["epoch"] == 2
        assert result["validations"] == [5, 8]
        assert result["rate"] == 0.0025


def test_a_stream_whose_slot_stays_away_is_read_by_the_others_if_that_is_wanted(
    train_on_streams: Callable[..., Any],
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=2, point="train_batch_end", step=2)])
    ft = {"max_restarts": 0, "supervision": {"lost_streams": "take_over"}}
    training = train_on_streams(plan, counts=[10, 14, 31], ft=ft, workers=1, dropout=0.3, source="sized")
    check(training, plan)
    assert training.trained_samples(2) == [all_samples(10, 14, 31)] * 2
    assert training.of("streams_left") == []
    assert [(event["epoch"], event["streams"]) for event in training.of("streams_taken")] == [(0, {"0": 2}), (1, {"0": 2})]


def test_a_job_stops_rather_than_to_leave_a_stream_if_that_is_wanted_and_the_next_trains_the_rest(
    train_on_streams: Callable[..., Any],
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="train_batch_end", step=2)])
    ft = {"max_restarts": 0, "supervision": {"lost_streams": "stop"}}
    options = {"devices": 2, "counts": [10, 31], "source": "sized", "dropout": 0.3, "save_every": 100}
    training = train_on_streams(plan, ft=ft, **options)
    assert training.job.returncode == 1
    assert "epoch 0 lacks batches of streams whose slots are not back: 6 of slot 1" in training.job.stderr
    rest = train_on_streams(name="rest", ckpt_path=str(training.directory / "steps" / "last-preempted.ckpt"), **options)
    rest.job.check()
    assert_weights_equal(*(result["fingerprint"] for result in rest.results.values()))
    trained = [*training.trained_samples(2), *rest.trained_samples(2)]
    assert trained[0] + trained[2] == all_samples(10, 31)
    assert trained[3] == all_samples(10, 31)
    assert {result["epoch"] for result in rest.results.values()} == {2}
    assert {len(result["validations"]) for result in rest.results.values()} == {2}, "none before the epoch was over"


def test_batches_that_are_left_when_a_job_stops_behind_the_planned_end_of_an_epoch_are_trained_by_the_next(
    train_on_streams: Callable[..., Any],
) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=1, point="forward", step=2)])
    options = {"devices": 2, "counts": [24, 24], "source": "sized", "max_epochs": 1, "trainer": {"val_check_interval": 0.5}}
    whole = train_on_streams(plan, name="whole", save_every=1, position="error", ft={"min_replicas": 2}, **options)
    check(whole, plan)
    assert whole.results[0]["global_step"] == 7, "one more than planned"
    path = str(whole.directory / "steps" / "step=6.ckpt")
    for position in ("", "error"):
        rest = train_on_streams(name=f"rest {position}", ckpt_path=path, position=position, **options)
        rest.job.check()
        assert {slot: result["trained"] for slot, result in rest.results.items()} == {0: [], 1: [[0, [*range(1020, 1024)]]]}
        assert {result["num_batches"] for result in rest.results.values()} == {7}, "of the same epoch"
        assert_weights_equal(rest.results[0]["fingerprint"], whole.results[0]["fingerprint"])


def test_steps_and_batches_that_are_none_are_left_out_of_the_average(train_on_streams: Callable[..., Any]) -> None:
    skip = {"0": [1, 2, 4], "1": [2]}
    none = {"0": [0, 3], "1": [3, 5]}
    training = train_on_streams(devices=2, counts=[24, 21], skip=skip, none=none, trainer={"precision": "bf16-mixed"})
    check(training)
    assert {result["global_step"] for result in training.results.values()} == {12}


def test_none_everywhere_leaves_the_weights_alone(train_on_streams: Callable[..., Any]) -> None:
    trained, skipped = (
        train_on_streams(name=name, devices=2, counts=[counts, counts], max_epochs=1, skip={"0": skip, "1": skip})
        for name, counts, skip in (("short", 8, []), ("long", 20, [2, 3, 4]))
    )
    check(skipped)
    assert_weights_equal(trained.results[0]["fingerprint"], skipped.results[0]["fingerprint"])
    assert skipped.results[0]["global_step"] == 5


def test_a_rank_without_any_data_keeps_the_others_company(train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=0, point="forward", step=2)])
    training = train_on_streams(plan, counts=[12, 0, 10], ft={"min_replicas": 3})
    check(training, plan)
    assert training.trained_samples(2) == [all_samples(12, 0, 10)] * 2


@pytest.mark.parametrize(
    ("source", "estimate_in"),
    [(source, hook) for source in ("iterable", "joint:max_size_cycle") for hook in ("", "configure_optimizers")]
    + [("whole", "configure_optimizers"), ("whole", "setup")],
)
def test_a_checkpoint_resumes_every_stream_where_it_was(
    source: str, estimate_in: str, train_on_streams: Callable[..., Any]
) -> None:
    options = {"devices": 2, "counts": [24, 13], "source": source, "save_every": 2, "estimate_in": estimate_in}
    whole = train_on_streams(name="whole", **options)
    rest = train_on_streams(name="rest", ckpt_path=str(whole.directory / "steps" / "step=2.ckpt"), **options)
    rest.job.check()
    assert_steps_contiguous(rest.events, last=whole.results[0]["global_step"])
    for slot, result in rest.results.items():
        assert result["trained"] == whole.results[slot]["trained"][2:]
        assert result["fingerprint"] == whole.results[slot]["fingerprint"]


@pytest.mark.parametrize("source", ["iterable", "whole"])
def test_a_rank_that_asks_for_its_loaders_in_setup_comes_back(source: str, train_on_streams: Callable[..., Any]) -> None:
    plan = FaultPlan(
        [
            Fault(kind="kill", slot=1, point="forward", step=1),
            Fault(kind="kill", slot=0, point="forward", step=3),
        ]
    )
    options = {"counts": [24, 24, 24], "source": source, "estimate_in": "setup", "ft": {"min_replicas": 3}}
    check(train_on_streams(plan, **options), plan)


def test_a_worker_that_is_killed_is_the_death_of_its_rank(train_on_streams: Callable[..., Any]) -> None:
    training = train_on_streams(counts=[40, 40, 40], workers=1, kill_worker=[1, 6], ft={"min_replicas": 3})
    check(training)
    assert "DataLoader worker" in training.job.stderr
    assert [event["how"] for event in training.of("exit") if event["code"] != 0 and event["incarnation"] == 0] != []
    assert training.trained_samples(2) == [all_samples(40, 40, 40)] * 2


def test_a_rank_without_a_batch_in_an_epoch_logs_values_of_its_own_none_the_less(train: Callable[..., Any]) -> None:
    plan = FaultPlan([Fault(kind="kill", slot=slot, point="forward", step=1) for slot in (0, 1)])
    options = {"max_epochs": 3, "num_samples": 2, "ft": {"max_restarts": 0}, "checkpoints": False}
    training = train(plan, model="LogsForItself", **options)
    training.assert_went_on(plan, num_samples=2, max_epochs=3)
    counts = {path.name: path.read_text().split() for path in training.directory.glob("own_*")}
    # In epoch 1 the third rank has no batch, until it takes over those of the dead.
    assert counts == {"own_0": ["1", "2", "2"], "own_1": ["1"], "own_2": ["0"]}
