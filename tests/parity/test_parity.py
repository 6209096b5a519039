"""What trains under ``ddp`` trains under FTStrategy alike."""

from collections.abc import Mapping
from typing import Any

import pytest
from row import Row
from rows import TABLE
from running import Batches, Outcome

# Of these all kinds of steps, of modules, of copies and of files: the others cost two minutes.
SHARDED = (
    *("adamw", "clipping by value", "accumulation with a rest", "bf16-mixed", "batch norm and dropout", "tied weights"),
    *("frozen part", "activation checkpointing", "moving average", "stochastic weight averaging", "two optimizers by hand"),
    *("lbfgs",),
)

EVERY_ROW = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_sharded_it_is_what_ddp_does:
        everything = metafunc.config.getoption("--shard-size", default=0)
        rows = [row for row in TABLE if everything or row.name in SHARDED]
        metafunc.parametrize("row", rows, ids=[row.name for row in rows])


def test_sharded_it_is_what_ddp_does(row: Row, batches: Batches) -> None:
    theirs, ours = batches.outcome(row.name, "ddp"), batches.outcome(row.name, "sharded")
    if isinstance(row.sharded, str):
        assert row.sharded in ours.error
        return
    for record in [*ours.records.values(), *theirs.records.values()]:
        # The only replica is copied to memory now and then, as what it would save.
        record["hooks"] = [hook for hook in record["hooks"] if not hook.endswith((".on_save_checkpoint", ".state_dict"))]
    assert_alike(ours, theirs, {**row.differs, **row.sharded})
