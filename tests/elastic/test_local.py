"""The engine over real ranks: operations that fail, ranks that die in them, ranks that come back."""

import atexit
import gc
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ft.elastic import groups, sockets
from lightning_ft.elastic.collectives import Collectives
from lightning_ft.elastic.local import LocalEngine
from lightning_ft.errors import CollectiveMismatchError, GroupBrokenError
from lightning_ft.events.log import read_events
from lightning_ft.testing import run_ranks


class FailsOnce:
    """A work that completes on its rank but reports an error there, as if its peers died just after."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        raise GroupBrokenError("injected after completion")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class UnreliableGroup:
    """A process group whose works fail now and then, on one rank at a time."""

    def __init__(self, group: Any, fails: Callable[[], bool]) -> None:
        self._group = group
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in ("allreduce", "allgather", "broadcast"):
            return method

        def call(*args: Any) -> Any:
            work = method(*args)
            return FailsOnce(work) if self._fails() else work

        return call


def make_unreliable(engine: LocalEngine, probability: float) -> None:
    chance = random.Random(engine.slot)
    create = engine._groups.create

    def wrap(group: Any) -> Any:
        calls = itertools.count()
        # The first works of a group are those of the reconfiguration, which is tried a few times only.
        return UnreliableGroup(group, lambda: next(calls) > 4 and chance.random() < probability)

    engine._groups.create = lambda *args: wrap(create(*args))  # type: ignore[method-assign]
    engine._group = wrap(engine._group)


def run_random_operations(engine: LocalEngine, count: int, probability: float) -> list[Any]:
    make_unreliable(engine, probability)
    collectives = Collectives(engine)
    shared = random.Random(0)
    results: list[Any] = []
    for number in range(count):
        kind = shared.choice(["mean", "sum", "broadcast", "gather", "object", "barrier", "count"])
        value = torch.arange(40, dtype=torch.float32) + number + 100 * engine.rank
        results.append(as_json(perform(collectives, kind, value, engine.rank, number)))
        engine.report_progress(number)
    return results


def perform(collectives: Collectives, kind: str, value: Tensor, rank: int, number: int) -> Any:
    if kind == "mean":
        return collectives.mean(value[:3])
    if kind == "sum":
        return collectives.all_reduce([value])[0]
    if kind == "broadcast":
        return collectives.broadcast_tensors([value])[0]
    if kind == "gather":
        return torch.stack(collectives.all_gather(value))
    if kind == "object":
        return collectives.broadcast_object({"from": rank, "number": number})
    if kind == "count":
        return collectives.count((rank + number) % 2 == 0)
    collectives.barrier("test")
    return None


def as_json(result: Any) -> Any:
    return result.tolist() if isinstance(result, Tensor) else result


def test_an_operation_that_failed_after_it_completed_elsewhere_yields_the_same_result_everywhere(
    tmp_path: Path,
) -> None:
    results = run_ranks(run_random_operations, 3, args=[60, 0.03], directory=tmp_path)
    assert results[0] == results[1] == results[2]
    assert results[0] == run_ranks(run_random_operations, 3, args=[60, 0.0])[0]
    (run,) = tmp_path.glob("ranks_*/events")
    generations = [event for event in read_events(run) if event["event"] == "generation" and event["slot"] is not None]
    assert any(event["replayed"] for event in generations)


def disagree(engine: LocalEngine) -> list[str]:
    collectives = Collectives(engine)
    collectives.barrier("together")
    try:
        if engine.rank == 1:
            collectives.barrier("one")
        else:
            collectives.mean(torch.ones(2))
    except CollectiveMismatchError as error:
        engine.end_call = lambda: None  # type: ignore[method-assign]  # the operations of this call are spoiled
        return [str(error)]
    return []


def test_ranks_in_different_operations_all_get_an_error_that_names_both() -> None:
    for (message,) in run_ranks(disagree, 3):
        assert "ranks 0, 2 entered mean (operation 1" in message
        assert "rank 1 entered barrier:one (operation 1" in message


def raise_inside(engine: LocalEngine) -> list[Any]:
    collectives = Collectives(engine)
    told: list[Any] = []
    attempts = [
        lambda: engine.run("own", lambda exchange: torch.ones(2).view(3)),
        lambda: collectives.all_reduce([torch.ones(2, dtype=torch.int16)]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except RuntimeError as error:
            told.append([type(error).__name__, str(error).partition("\n")[0], engine.generation])
    return [*told, collectives.count(True)]


def test_what_an_operation_itself_raises_is_no_death_and_is_raised_where_it_was() -> None:
    for own, of_gloo, agreed in run_ranks(raise_inside, 3):
        assert own == ["RuntimeError", "shape '[3]' is invalid for input of size 2", 1]
        assert of_gloo == ["RuntimeError", "Invalid scalar type", 2], "tried once more: connections fail with its type, too"
        assert agreed == [3, 3]


def die_while_connecting(engine: LocalEngine) -> Any:
    groups._CONNECT_TIMEOUT = timedelta(seconds=1000)  # gloo alone would wait for so long
    collectives = Collectives(engine)
    create = engine._groups.create

    def die(*args: Any) -> Any:
        if engine.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # after "go": the others already wait for this rank's address
        return create(*args)

    # Before the barrier: a rank that is slow to leave it may meet the death of slot 2 in there.
    engine._groups.create = die  # type: ignore[method-assign]
    collectives.barrier("together")
    if engine.slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return as_json(collectives.all_reduce([torch.ones(1)])[0])


def test_a_death_between_go_and_connect_does_not_block_the_others() -> None:
    results = run_ranks(die_while_connecting, 4)
    assert results == [[2.0], None, None, [2.0]]


def join_and_count(engine: LocalEngine) -> Any:
    collectives = Collectives(engine)
    if engine.alone:
        state = engine.join()
        engine.enter()
    else:
        collectives.barrier("together")
        engine.report_progress(1)
        if engine.slot == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"weights": torch.full((3,), 7.0)}
        collectives.barrier("death is noticed here")
        while not collectives.count(engine.join_wanted)[0]:
            pass
        while not engine.admit_joiners(lambda slots: {**state, "to": list(slots)}):
            pass
    total = collectives.all_reduce([torch.ones(1)])[0]
    return {"members": list(engine.members), "weights": state["weights"].tolist(), "total": total.tolist()}


def test_a_rank_that_comes_back_receives_the_state_and_is_the_last_one() -> None:
    results = run_ranks(join_and_count, 3, max_restarts=1)
    assert results == [{"members": [1, 2, 0], "weights": [7.0] * 3, "total": [3.0]}] * 3


class FallsApart(FailsOnce):
    """A work that completes everywhere; then the connections of this rank are gone, as when a peer dies just after."""

    def __init__(self, work: Any, generation: int) -> None:
        super().__init__(work)
        self._generation = generation

    def wait(self) -> None:
        self._work.wait()
        assert sockets.shut_down(sockets.generation_address(self._generation))
        raise GroupBrokenError("its peer is gone")


def join_as_a_peer_dies(engine: LocalEngine) -> Any:
    if engine.alone:
        create = engine._groups.create

        def create_once(rank: int, size: int, vigil: Any) -> Any:
            engine._groups.create = create  # type: ignore[method-assign]
            group: Any = create(rank, size, vigil)
            start = group.allreduce

            def fall_apart(*args: Any) -> FallsApart:
                group.allreduce = start
                return FallsApart(start(*args), vigil.generation)

            group.allreduce = fall_apart
            return group

        engine._groups.create = create_once  # type: ignore[method-assign,assignment]
    return join_and_count(engine) | {"generation": engine.generation}


def test_a_joiner_that_has_the_state_is_in_although_a_peer_dies_before_it_learns_that_all_have_it() -> None:
    results = run_ranks(join_as_a_peer_dies, 3, max_restarts=1)
    # Generations of the start, the death, the admission, and connections that are made again.
    expected = {"members": [1, 2, 0], "weights": [7.0] * 3, "total": [3.0], "generation": 4}
    assert results == [expected] * 3


def die_before_connecting_back(engine: LocalEngine) -> Any:
    """The last rank tells the others its address and dies before it connects: they wait for it inside gloo."""
    groups._CONNECT_TIMEOUT = timedelta(seconds=1000)
    if engine.slot == 2:
        create = groups.create_gloo_group
        another = engine.connect(timedelta(seconds=1000))

        def die(store: Any, rank: int, *args: Any) -> Any:
            def poll() -> None:
                while not another.check([f"generation/{engine.generation}/0/{rank}"]):
                    pass
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=poll, daemon=True).start()
            return create(store, rank, *args)

        groups.create_gloo_group = die
    Collectives(engine).barrier("together")
    if engine.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (total,) = Collectives(engine).all_reduce([torch.ones(1)])
    return total.tolist()


def test_a_death_inside_the_connection_of_a_generation_does_not_block_the_others() -> None:
    assert run_ranks(die_before_connecting_back, 4)[0] == [2.0]


def gather_states(engine: LocalEngine) -> Any:
    mine = torch.empty(0) if engine.slot == 1 else torch.full((2, engine.slot + 1), engine.slot, dtype=torch.int64)
    return [tensor.tolist() for tensor in Collectives(engine).all_gather_ragged(mine)]


def test_a_rank_without_samples_gathers_the_states_of_the_others_whatever_their_dtype() -> None:
    for gathered in run_ranks(gather_states, 3):
        assert gathered == [[[0], [0]], [], [[2, 2, 2], [2, 2, 2]]]


def run_another_operation_first(engine: LocalEngine, dies: bool) -> Any:
    began = engine.generation
    pending = engine.open("gradients")
    if dies and engine.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (first,) = Collectives(engine).all_reduce([torch.full((2,), 1.0 + engine.slot)])
    size = engine.run("gradients", lambda exchange: exchange.size, opened=pending)
    Collectives(engine).barrier("after it")
    return [first.tolist(), size, engine.generation - began]


def test_an_operation_that_was_opened_early_waits_for_those_that_come_before_it() -> None:
    assert run_ranks(run_another_operation_first, 3, args=[False]) == [[[6.0, 6.0], 3, 1]] * 3
    survivors = run_ranks(run_another_operation_first, 3, args=[True])[::2]
    assert [told[:2] for told in survivors] == [[[4.0, 4.0], 2]] * 2


def fork_a_child_that_ends_as_programs_do(engine: LocalEngine) -> Any:
    gc.disable()
    garbage: list[Any] = [engine._group]
    garbage.append(garbage)
    if engine.slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    Collectives(engine).barrier("death is noticed here")
    del garbage
    child = os.fork()
    if child == 0:
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    generation = engine.generation
    (total,) = Collectives(engine).all_reduce([torch.ones(1)])
    return [status, total.tolist(), engine.generation - generation]


def test_a_forked_child_that_ends_leaves_the_job_to_its_parent() -> None:
    assert run_ranks(fork_a_child_that_ends_as_programs_do, 3)[:2] == [[0, [2.0], 0]] * 2
