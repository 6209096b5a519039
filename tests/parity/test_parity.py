"""What trains under ``ddp`` trains under FTStrategy alike, and goes on when a rank is killed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from row import Row
from rows import TABLE
from running import Batches, Outcome, read, start_with_a_death

from lightning_ft.events.log import Events
from lightning_ft.testing import (
    FaultPlan,
    assert_every_ticket_once,
    assert_recovered,
    assert_steps_contiguous,
    assert_used_up,
)

# Of these all kinds of steps, of modules, of copies and of files: the others cost two minutes.
SHARDED = (
    *("adamw", "clipping by value", "accumulation with a rest", "bf16-mixed", "batch norm and dropout", "tied weights"),
    *("frozen part", "activation checkpointing", "moving average", "stochastic weight averaging", "two optimizers by hand"),
    *("lbfgs",),
)

EVERY_ROW = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])
WITH_A_DEATH = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.kill is not False])


def first_difference(ours: Any, theirs: Any, where: str) -> str:
    """Where two records differ first, and how."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key not in ours or key not in theirs:
                return f"{where}: only {'we have' if key in ours else 'ddp has'} {key!r}: {ours.get(key, theirs.get(key))}"
            if ours[key] != theirs[key]:
                return first_difference(ours[key], theirs[key], f"{where} > {key}")
    if isinstance(ours, list) and isinstance(theirs, list):
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            if mine != other:
                if isinstance(mine, dict | list):
                    return first_difference(mine, other, f"{where}[{number}]")
                before, after = max(number - 3, 0), number + 4
                return f"{where}[{number}]:\n  ours {ours[before:after]}\n  ddp  {theirs[before:after]}"
        if len(ours) != len(theirs):
            more = (ours[len(theirs) :] or theirs[len(ours) :])[0]
            return f"{where}: ours has {len(ours)}, ddp {len(theirs)} items; the first more is {more}"
    return f"{where}: ours {ours!r}, ddp {theirs!r}"


@EVERY_ROW
def test_without_faults_it_is_what_ddp_does(row: Row, batches: Batches) -> None:
    assert_alike(batches.outcome(row.name, "ft"), batches.outcome(row.name, "ddp"), row.differs)


def assert_alike(ours: Outcome, theirs: Outcome, may_differ: Mapping[str, str]) -> None:
    assert not theirs.error, f"under ddp:\n{theirs.error}"
    assert not ours.error, ours.error
    assert ours.records.keys() == theirs.records.keys() == {0, 1}
    differences = []
    for rank in range(2):
        mine, other = dict(ours.records[rank]), dict(theirs.records[rank])
        parts = [part for part in other if part not in may_differ and mine[part] != other[part]]
        differences += [first_difference(mine[part], other[part], f"rank {rank} > {part}") for part in parts]
    if ours.files != theirs.files and "files" not in may_differ:
        differences.append(first_difference(ours.files, theirs.files, "files"))
    assert not differences, "\n".join(differences)


@EVERY_ROW
def test_sharded_it_is_what_ddp_does(row: Row, batches: Batches, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--shard-size", default=0) and row.name not in SHARDED:
        pytest.skip("`--shard-size 2` runs all rows")
    theirs, ours = batches.outcome(row.name, "ddp"), batches.outcome(row.name, "sharded")
    if isinstance(row.sharded, str):
        assert row.sharded in ours.error
        return
    assert_alike(ours, theirs, {**row.differs, **row.sharded})


@WITH_A_DEATH
def test_a_death_changes_nothing_that_is_promised(row: Row, tmp_path: Path) -> None:
    plan = FaultPlan([row.fault])
    job = start_with_a_death(row, plan, tmp_path)
    job.check()
    assert_used_up(plan, job.events)
    assert_recovered(job.events)
    if row.audited:
        assert_steps_contiguous(job.events)
        assert_every_ticket_once(job.events, unfinished_epoch=row.cut)
        assert_no_sample_twice(job.events, tmp_path / row.name)
    records = read(tmp_path / row.name).records
    assert_ranks_agree(records, row)
    for slot, record in records.items():
        who = f"slot {slot}, incarnation {record['incarnation']}"
        assert_hooks_balanced(Counter(record["hooks"]), row.unbalanced, who)


def assert_no_sample_twice(events: Events, directory: Path) -> None:
    lines = [line for path in directory.glob("samples_*.jsonl") for line in path.read_text().splitlines()]
    samples = {(epoch, ticket): numbers for epoch, ticket, numbers in map(json.loads, lines)}
    trained: Counter[tuple[int, int]] = Counter()
    for event in {event["step"]: event for event in events if event["event"] == "step"}.values():
        for ticket in [ticket for tickets in event["tickets"].values() for ticket in tickets]:
            trained.update((event["epoch"], number) for number in samples.get((event["epoch"], ticket), ()))
    assert not [sample for sample, count in trained.items() if count > 1]


def assert_ranks_agree(records: dict[int, dict[str, Any]], row: Row) -> None:
    assert records
    (first, reference), *others = records.items()
    for slot, record in others:
        for part in ("global_step", "epoch", "state", "should_stop", "weights", "random", *row.alike):
            assert record[part] == reference[part], f"slots {slot} and {first}: {part}"
        weights = {step["step"]: step["weights"] for step in reference["steps"]}
        for step in record["steps"] if row.audited else ():
            assert weights.get(step["step"], step["weights"]) == step["weights"], f"slots {slot} and {first}: {step}"


def assert_hooks_balanced(counts: Counter[str], unbalanced: Sequence[str], who: str) -> None:
    for hook, count in counts.items():  # of the module: Lightning calls callbacks' epoch ends in two goes
        name = hook.removeprefix("lightning_module.on_").removesuffix("_start")
        if hook == f"lightning_module.on_{name}_start" and name not in unbalanced:
            ends = counts[f"lightning_module.on_{name}_end"]
            assert ends == count, f"{who}: {count} calls of on_{name}_start, {ends} of on_{name}_end"
