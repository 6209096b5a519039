"""The default process group under the elastic engine: what user code and libraries call on ``torch.distributed``."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.elastic.process_group import install_once
from lightning_ft.testing import run_ranks, run_without_supervisor

SCRIPT = Path(__file__).parent / "jobs" / "raw_collectives.py"


def call_all(engine: LocalEngine, script: str) -> Any:
    install_once(engine, Collectives(engine))
    return load(script).call_all(engine.rank, 3)


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location("raw_collectives", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_collective_yields_what_gloo_yields(tmp_path: Path) -> None:
    ours = run_ranks(call_all, 3, args=[str(SCRIPT)])
    run_without_supervisor(SCRIPT, num_ranks=3, directory=tmp_path).check()
    for rank in range(3):
        theirs = json.loads((tmp_path / f"result_{rank}.json").read_text())
        for name, value in theirs.items():
            assert ours[rank][name] == value, name


def die_in_collectives(engine: LocalEngine) -> Any:
    install_once(engine, Collectives(engine))
    slot, told = engine.slot, []

    def mine() -> list[torch.Tensor]:
        return [torch.tensor([10.0 * slot + recipient]) for recipient in engine.members]

    def die(number: int) -> None:
        dist.barrier()
        if slot == number:
            os.kill(os.getpid(), signal.SIGKILL)

    gathered, output, outputs = [torch.ones(1) for _ in range(5)], torch.empty(1), [torch.ones(1) for _ in range(3)]
    die(1)
    dist.all_gather(gathered, torch.tensor([float(slot)]))
    told.append(torch.cat(gathered).tolist())
    die(0)
    dist.reduce_scatter(output, mine())
    told.append(output.tolist())
    die(3)
    dist.all_to_all(outputs, mine())
    told.append(torch.cat(outputs).tolist())
    return told


def test_the_dead_are_left_out_of_collectives_and_rows_reach_those_they_are_for() -> None:
    results = run_ranks(die_in_collectives, 5)
    assert [result is None for result in results] == [True, True, False, True, False]
    assert results[2] == [[0.0, 2.0, 3.0, 4.0, 0.0], [22.0 + 32.0 + 42.0], [22.0, 0.0, 42.0]]
    assert results[4] == [[0.0, 2.0, 3.0, 4.0, 0.0], [24.0 + 34.0 + 44.0], [24.0, 0.0, 44.0]]


def ask_for_what_can_not_be(engine: LocalEngine) -> list[str]:
    install_once(engine, Collectives(engine))
    attempts = [
        lambda: dist.send(torch.ones(1), dst=1 - engine.rank),
        lambda: dist.new_group([0]),
        lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
        lambda: dist.all_to_all([torch.ones(1)] * 3, [torch.ones(1)] * 3),
    ]
    told = []
    for attempt in attempts:
        try:
            attempt()
        except (NotImplementedError, ValueError) as error:
            told.append(str(error))
    if engine.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.scatter(torch.ones(1), None, src=0)
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_what_can_not_be_done_or_made_good_is_an_error_that_says_what_to_do() -> None:
    send, group, gather, rows, scatter = run_ranks(ask_for_what_can_not_be, 2)[1]
    assert "an operation of two ranks can't be tried again" in send
    assert "`torch.distributed.new_group([0])` is not available" in group
    assert "into 1 tensors, but 2 ranks are alive" in gather
    assert "of 3 tensors, but 2 ranks are alive" in rows
    assert "the rank that had the tensors died" in scatter


def call_all_in_a_start_up_of_its_own(engine: LocalEngine, script: str) -> Any:
    install_once(engine, Collectives(engine))
    dist.barrier()  # of one, in a rank that was started again
    if engine.alone:
        told = load(script).call_all(dist.get_rank(), dist.get_world_size())
        engine.join()
        engine.enter()
        return [told["size"], told["gather"][0], len(told["objects"][0])]
    engine.report_progress(1)
    if engine.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    while not Collectives(engine).count(engine.join_wanted)[0]:
        pass
    while not engine.admit_joiners(lambda slots: {}):
        pass
    return None


def test_a_rank_that_starts_while_others_train_gets_what_it_would_get_if_they_were_like_it() -> None:
    results = run_ranks(call_all_in_a_start_up_of_its_own, 3, args=[str(SCRIPT)], max_restarts=1)
    assert results == [None, [3, [[3.0, 6.0]] * 3, 3], None]
