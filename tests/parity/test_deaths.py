"""What trains under ``ddp`` goes on under FTStrategy when a rank is killed."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from row import Row
from rows import TABLE
from running import read, start_with_a_death

from lightning_ft.events.log import Events
from lightning_ft.testing import (
    FaultPlan,
    assert_every_ticket_once,
    assert_recovered,
    assert_steps_contiguous,
    assert_used_up,
)

WITH_A_DEATH = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.kill is not False])


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
