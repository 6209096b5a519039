"""What must hold after a job in which ranks died."""

import csv
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ft.checkpoint.verify import damage
from lightning_ft.events.analysis import analyze
from lightning_ft.events.audit import Event, audit
from lightning_ft.sharding.full_state import gather_full
from lightning_ft.testing.fault_plan import FaultPlan


def assert_every_ticket_once(events: Iterable[Event], *, unfinished_epoch: bool = False) -> None:
    """Fail unless each epoch trained each of its batches in exactly one committed step.

    Args:
        events: Of one run.
        unfinished_epoch: Whether training was meant to stop in the middle of the last epoch.

    """
    found = audit(events)
    assert found.epochs, "No rank recorded a step."
    problems = found.problems(unfinished_epoch=unfinished_epoch)
    assert not problems, "\n".join(problems)


def assert_steps_contiguous(events: Iterable[Event], last: int | None = None) -> None:
    """Fail unless every step up to the last one was committed, and all ranks agree about what it contained.

    Args:
        events: Of one run.
        last: The last step; None: whichever it was.

    """
    found = audit(events)
    assert found.steps, "No rank recorded a step."
    assert not found.steps_lost, f"No rank committed steps {list(found.steps_lost)}."
    assert not found.conflicts, f"Ranks disagree about what is in steps {list(found.conflicts)}."
    assert last is None or found.steps[-1] == last, f"The last step is {found.steps[-1]}, not {last}."


def assert_reconfigurations(events: Iterable[Event], expected: Sequence[str | tuple[str, int]]) -> None:
    """Fail unless the membership changed in exactly this way.

    Args:
        events: Of one run.
        expected: For each generation its reason ("start", "death", "join", "error", "exclude", "cancelled"), or the
            reason and the one slot that died or joined.

    """
    generations = audit(events).generations
    before: tuple[int, ...] = ()
    found: list[tuple[str, tuple[int, ...]]] = []
    for generation in generations:
        joined = tuple(sorted(set(generation.members) - set(before)))
        found.append((generation.reason, joined if generation.reason == "join" else generation.dead))
        before = generation.members
    matches = len(found) == len(expected) and all(
        reason == wanted if isinstance(wanted, str) else (reason, slots) == (wanted[0], (wanted[1],))
        for (reason, slots), wanted in zip(found, expected, strict=False)
    )
    assert matches, f"Expected the reconfigurations {list(expected)}, but there were {found}."


def assert_recovered(events: Iterable[Event]) -> None:
    """Fail unless the job ended well and every death of a member was followed by a step of the survivors.

    A death in the last step, or after it, needs no step to follow.

    Args:
        events: Of one run.

    """
    found = audit(events)
    assert found.exit_code == 0, f"The job ended with code {found.exit_code}."
    for death in found.deaths:
        is_last = not found.steps or death.step >= found.steps[-1]
        recovered = not death.member or is_last or death.recovery is not None
        assert recovered, f"Nobody committed a step after slot {death.slot} died ({death.how}) at step {death.step}."


def assert_no_violations(run: Iterable[Event] | str | os.PathLike[str], *, checkpoints: bool = True) -> None:
    """Fail if the run violates a rule of :mod:`lightning_ft.events.rules`, with all violations.

    Args:
        run: Its events, or the directory that they are in.
        checkpoints: Whether to look at the checkpoints that should be there, too.

    """
    found = analyze(run, damage if checkpoints else None).violations
    assert not found, "\n".join(map(str, found))


def assert_used_up(plan: FaultPlan, events: Iterable[Event] = ()) -> None:
    """Fail unless every fault of the plan fired, with the list of those that did not.

    Args:
        plan: The plan.
        events: Of the run; needed if the plan has no directory.

    """
    fired = {event["index"] for event in events if event["event"] == "fault"}
    unused = [fault for index, fault in enumerate(plan.faults) if index not in fired and not plan.has_fired(index)]
    assert not unused, "These faults never fired:\n" + "\n".join(map(str, unused))


def fingerprint(trainer: Trainer) -> dict[str, str]:
    """Collective if the module is sharded. Return a digest of each tensor and number of its and the optimizers' state.

    Collective in the replica if they are sharded: the digests are those of whole tensors.

    Args:
        trainer: After or while fitting.

    """
    state: dict[str, Any] = {"module": trainer.lightning_module.state_dict()}
    state |= {f"optimizer {n}": optimizer.state_dict() for n, optimizer in enumerate(trainer.optimizers)}
    return {name: _digest(value) for name, value in _flatten("", gather_full(state))}


def assert_weights_equal(*states: Mapping[str, Any]) -> None:
    """Fail unless all states are the same bit for bit, naming what differs.

    Args:
        *states: State dictionaries of tensors, or results of :func:`fingerprint`.

    """
    assert len(states) > 1, f"`assert_weights_equal` got {len(states)} states: expected at least 2."
    first, *others = ({name: _digest(value) for name, value in _flatten("", state)} for state in states)
    for number, other in enumerate(others, start=1):
        different = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        assert not different, f"State {number} differs from state 0 in {', '.join(different)}."


def assert_metrics_equal(csv_a: str | os.PathLike[str], csv_b: str | os.PathLike[str]) -> None:
    """Fail unless two files of a ``CSVLogger`` hold the same rows, naming the first difference.

    Args:
        csv_a: A ``metrics.csv``.
        csv_b: Another one.

    """
    rows_a, rows_b = _read_rows(csv_a), _read_rows(csv_b)
    for number, (row_a, row_b) in enumerate(zip(rows_a, rows_b, strict=False)):
        names = sorted(name for name in row_a.keys() | row_b.keys() if row_a.get(name) != row_b.get(name))
        told = ", ".join(f"{name} is {row_a.get(name)!r} and {row_b.get(name)!r}" for name in names)
        assert not names, f"In row {number} (step {row_a.get('step')}) {told}."
    assert len(rows_a) == len(rows_b), f"One file has {len(rows_a)} rows, the other {len(rows_b)}."


def _read_rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _flatten(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _flatten(f"{name}.{key}" if name else str(key), item)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
