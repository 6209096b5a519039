"""Ten violations of each rule, put into the events of a run without any, are all found; without them nothing is."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import SyntheticRun, write
from lightning_ft.checkpoint import save_training_state
from lightning_ft.checkpoint.verify import damage
from lightning_ft.events.analysis import Analysis, analyze

Record = dict[str, Any]
NUM_EVENTS, NUM_SLOTS, EPOCH, PERIOD = 1600, 3, 240, 60
LAST = 300  # not after the last step


def clean_run(seed: int = 0) -> list[Record]:
    return list(SyntheticRun(NUM_SLOTS, seed=seed, epoch_tickets=EPOCH, period=PERIOD).events(NUM_EVENTS))


def rules_of(analysis: Analysis) -> set[str]:
    return {violation.rule for violation in analysis.violations}


def indices(events: list[Record], kind: str, where: Callable[[Record], bool] = lambda event: True) -> list[int]:
    return [i for i, event in enumerate(events) if event["event"] == kind and where(event)]


def copied(events: list[Record]) -> list[Record]:
    """Events that can be changed one by one."""
    return [json.loads(json.dumps(event)) for event in events]


def everywhere(events: list[Record], step: int) -> list[Record]:
    return [event for event in events if event["event"] == "step" and event["step"] == step]


def lose_a_field(events: list[Record], chance: random.Random) -> None:
    event = chance.choice([event for event in events if event["event"] in ("step", "exit", "checkpoint", "joined", "epoch")])
    name = {"step": "step", "exit": "how", "checkpoint": "path", "joined": "epoch", "epoch": "num_tickets"}[event["event"]]
    if event["event"] == "step":
        event["members"] = 3
    else:
        event["note"] = event.pop(name)


def train_a_batch_twice(events: list[Record], chance: random.Random) -> None:
    first, second = sorted(chance.sample(range(1, EPOCH // NUM_SLOTS), 2))
    ticket = everywhere(events, first)[0]["tickets"]
    for event in everywhere(events, second):
        slot = next(iter(event["tickets"]))
        event["tickets"][slot] = [*event["tickets"][slot], *next(iter(ticket.values()))]


def train_a_batch_never(events: list[Record], chance: random.Random) -> None:
    for event in everywhere(events, chance.randrange(1, EPOCH // NUM_SLOTS)):
        event["tickets"] = {slot: [] for slot in event["tickets"]}


def lose_a_step(events: list[Record], chance: random.Random) -> None:
    step = chance.randrange(2, LAST)
    tickets = everywhere(events, step)[0]["tickets"]
    for event in everywhere(events, step + 1):
        event["tickets"] = {slot: [*own, *tickets.get(slot, [])] for slot, own in event["tickets"].items()}
    events[:] = [event for event in events if event not in everywhere(events, step)]


def disagree_about_a_step(events: list[Record], chance: random.Random) -> None:
    chance.choice(everywhere(events, chance.randrange(2, LAST)))["tickets"] = {"0": [7]}


def diverge(events: list[Record], chance: random.Random) -> None:
    joined = {(event["slot"], event["step"]) for event in events if event["event"] == "joined"}
    told = [events[i] for i in indices(events, "checksum", lambda event: (event["slot"], event["step"]) not in joined)]
    compared = [event for event in told if sum(event["step"] == other["step"] for other in told) > 1]
    chance.choice(compared)["digest"] = "0" * 16


def join_with_other_weights(events: list[Record], chance: random.Random) -> None:
    joined = events[chance.choice(indices(events, "joined"))]
    own = [e for e in events if e["event"] == "checksum" and e["slot"] == joined["slot"] and e["step"] == joined["step"]]
    own[0]["digest"] = "f" * 16


def forget_a_death(events: list[Record], chance: random.Random) -> None:
    exit = chance.choice([event for event in events if event["event"] == "exit" and event["code"] != 0])
    lost = [e for e in events if e["event"] == "generation" and e["reason"] == "death" and 0 < e["t"] - exit["t"] < 0.01]
    events[:] = [event for event in events if event not in lost]


def never_come_back(events: list[Record], chance: random.Random) -> None:
    exit = chance.choice([event for event in events if event["event"] == "exit" and event["code"] != 0])
    again = (exit["slot"], exit["incarnation"] + 1)
    events[:] = [event for event in events if (event["slot"], event["incarnation"]) != again or event["event"] != "spawn"]
    for event in events:
        event["t"] = exit["t"] + max(0.0, event["t"] - exit["t"]) * 1000 if event["t"] > exit["t"] else event["t"]


def adopt_other_members(events: list[Record], chance: random.Random) -> None:
    event = events[chance.choice(indices(events, "generation", lambda event: event["slot"] is not None))]
    event["members"] = event["members"][::-1]


def skip_a_generation(events: list[Record], chance: random.Random) -> None:
    del events[chance.choice(indices(events, "generation", lambda event: event["slot"] is None and event["number"] > 1))]


def commit_as_a_ghost(events: list[Record], chance: random.Random) -> None:
    at = chance.choice(indices(events, "exit", lambda event: event["code"] != 0))
    told = next(event for event in events[at:] if event["event"] == "step")
    events.insert(at + 12, {**told, "slot": events[at]["slot"], "incarnation": events[at]["incarnation"], "t": told["t"]})


def commit_without_being_a_member(events: list[Record], chance: random.Random) -> None:
    event = events[chance.choice(indices(events, "step"))]
    event["members"] = [slot for slot in event["members"] if slot != event["slot"]]


SEEDED: list[tuple[str, Callable[[list[Record], random.Random], None]]] = [
    ("well-formed", lose_a_field),
    ("samples-once", train_a_batch_twice),
    ("samples-once", train_a_batch_never),
    ("steps-contiguous", lose_a_step),
    ("steps-contiguous", disagree_about_a_step),
    ("replicas-alike", diverge),
    ("joiners-alike", join_with_other_weights),
    ("deaths-recovered", forget_a_death),
    ("deaths-recovered", never_come_back),
    ("members-agree", adopt_other_members),
    ("members-agree", skip_a_generation),
    ("dead-are-silent", commit_as_a_ghost),
    ("dead-are-silent", commit_without_being_a_member),
]


@pytest.fixture(scope="module")
def clean() -> list[Record]:
    return clean_run()


@pytest.mark.parametrize(("rule", "violate"), SEEDED, ids=[violate.__name__ for _, violate in SEEDED])
def test_ten_violations_of_each_rule_are_found(
    rule: str, violate: Callable[[list[Record], random.Random], None], clean: list[Record]
) -> None:
    for seed in range(10):
        events = copied(clean)
        violate(events, random.Random(seed))
        found = analyze(events)
        assert rule in rules_of(found), f"seed {seed}: {found.violations}"


def test_no_rule_is_violated_by_runs_in_which_ranks_die_and_return() -> None:
    for seed in range(3):
        found = analyze(clean_run(seed))
        assert found.violations == ()
        assert len(found.fits[0].deaths) >= 3
        assert len(found.fits[0].joins) >= 3


def test_a_checkpoint_that_was_neither_replaced_nor_removed_must_be_intact(clean: list[Record]) -> None:
    paths = sorted({event["path"] for event in clean if event["event"] == "checkpoint"})
    assert len(paths) > 1
    looked_at: list[str] = []

    def verify(path: str) -> str | None:
        looked_at.append(path)
        return "it does not exist"

    (violation,) = analyze(clean, verify).violations
    assert looked_at == [paths[-1]]
    assert (violation.rule, "it does not exist" in violation.text) == ("checkpoints-intact", True)
    removed = {"t": clean[-1]["t"], "event": "checkpoint_removed", "slot": 0, "incarnation": 0, "path": paths[-1]}
    assert analyze([*clean, removed], verify).violations == ()


def test_ten_kinds_of_damage_to_a_checkpoint_are_found(tmp_path: Path, clean: list[Record]) -> None:
    path = tmp_path / "saved"
    module = torch.nn.Linear(64, 64)
    save_training_state(module, torch.optim.SGD(module.parameters(), lr=0.1), path, step=10)
    saved = {**next(event for event in clean if event["event"] == "checkpoint"), "path": str(path)}
    events = [event for event in clean if not event["event"].startswith("checkpoint")] + [saved]
    assert analyze(events, damage).violations == ()
    whole = shutil.copytree(path, tmp_path / "whole")
    for seed in range(10):
        chance = random.Random(seed)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        victim = chance.choice([path, *sorted(file for file in path.rglob("*") if file.is_file())])
        if victim == path:
            shutil.rmtree(path)
        elif chance.random() < 0.3:
            victim.unlink()
        else:
            at = chance.randrange(victim.stat().st_size)
            content = bytearray(victim.read_bytes())
            content[at] ^= 1 << chance.randrange(8)
            victim.write_bytes(content if chance.random() < 0.5 else content[:at])
        assert rules_of(analyze(events, damage)) == {"checkpoints-intact"}, f"seed {seed}: {victim}"


def test_a_step_that_a_dying_rank_made_alone_and_its_checksum_do_not_count() -> None:
    def at(t: float, kind: str, slot: int | None, **fields: Any) -> Record:
        return {"t": t, "event": kind, "slot": slot, "incarnation": 0, **fields}

    content = {"epoch": 0, "members": [0, 1]}
    events = [
        at(0.0, "epoch", 0, epoch=0, num_tickets=2),
        at(1.0, "step", 1, step=1, tickets={"0": [0], "1": [1]}, **content),
        at(1.1, "checksum", 1, step=1, digest="a"),
        at(1.2, "exit", 1, how="SIGKILL", code=-9, member=True),
        at(1.3, "generation", None, number=1, members=[0], reason="death", dead=[]),
        at(1.3, "generation", 0, generation=1, members=[0], reason="death", dead=[[1, "SIGKILL"]], joined=[], stall_ms=1.0),
        at(1.4, "step", 0, step=1, tickets={"0": [0]}, **content),
        at(1.5, "checksum", 0, step=1, digest="b"),
        at(1.6, "step", 0, step=2, tickets={"0": [1]}, **content),
    ]
    assert analyze(events).violations == ()


def test_a_later_trainer_may_log_elsewhere(clean: list[Record]) -> None:
    last = next(event["number"] for event in reversed(clean) if event["event"] == "generation" and event["slot"] is None)
    later = [
        event for event in clean if event["event"] == "generation" and last in (event.get("number"), event.get("generation"))
    ]
    assert analyze(later).violations == ()


def test_a_second_training_of_the_same_script_is_judged_by_itself(clean: list[Record]) -> None:
    fit = {"t": clean[-1]["t"], "event": "fit", "slot": 0, "incarnation": 0}
    again = [event for event in copied(clean) if event["event"] not in ("run", "exit", "generation", "finish")]
    joined = {event["slot"] for event in again if event["event"] == "joined"}
    again = [event for event in again if event["incarnation"] == 0 and event["t"] < again[0]["t"] + 2.0]
    assert joined
    events = [event for event in copied(clean) if event["event"] not in ("exit", "finish")]
    found = analyze([*events, fit, *again])
    assert (len(found.fits), found.fits[1].steps[0]) == (2, 1)
    assert "steps-contiguous" not in rules_of(found)


def test_a_run_that_resumed_is_judged_together_with_the_one_before(tmp_path: Path) -> None:
    first = [event for event in clean_run() if event["event"] not in ("exit", "finish", "fit_end") or event["slot"] is None]
    cut = next(i for i, event in enumerate(first) if event.get("step") == 100)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    write(iter(first[:cut]), tmp_path / "one")
    last = [event for event in first if event.get("step", 0) > 60 and event["event"] in ("step", "epoch")]
    resumed = {"t": 0.0, "event": "resumed", "slot": 0, "incarnation": 0, "path": "step=60", "step": 60}
    resumed |= {"run_id": "one", "events": str(tmp_path / "gone" / "one"), "attempt": 1}
    members = [event for event in last if event["step"] < 80]
    write(iter([resumed, *members]), tmp_path / "two")
    found = analyze(tmp_path / "two")
    assert found.violations == ()
    (fit,) = found.fits
    assert fit.steps == tuple(range(1, 80))
    told = {ticket for event in [*first, *last] if event.get("step", 99) < 80 for own in _tickets(event) for ticket in own}
    assert (fit.epochs[0].twice, fit.epochs[0].num_trained) == ((), len(told))
    (tmp_path / "one").rename(tmp_path / "nowhere")  # of what was before nothing is known then
    alone = analyze(tmp_path / "two")
    assert alone.violations == ()
    assert alone.fits[0].steps == tuple(range(61, 80))


def _tickets(event: Record) -> list[list[int]]:
    return list(event.get("tickets", {}).values())
