"""Each thing is dumped once at each moment, whatever runs again."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ft.dump import dump
from lightning_ft.dump.hooks import ModuleHooks
from lightning_ft.dump.index import Moment
from lightning_ft.dump.recorder import Recorder
from lightning_ft.dump.selection import Selection
from lightning_ft.dump.values import activate, deactivate


class Written:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.puts: list[tuple[Moment, str, int]] = []

    def put(self, moment: Moment, name: str, tensor: Tensor, call: int = 0) -> None:
        self.puts.append((moment, name, call))


def recording(module: nn.Module, *patterns: str) -> tuple[Written, Recorder, ModuleHooks]:
    written = Written()
    recorder = Recorder(written, Selection(patterns or ["*"]))
    return written, recorder, ModuleHooks(module, recorder)


def test_a_step_that_is_broken_off_and_run_again_is_not_written_twice() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    written, recorder, _ = recording(module, "output:*", "grad_output:*", "value:*")
    activate(recorder)
    recorder.at(Moment(7, 0))
    recorder.begin_pass()
    module[0](torch.ones(2))  # here a rank dies
    for _ in range(3):  # its replica begins again; or the step is replayed to find out whether it can be trusted
        recorder.begin_pass()
        for _ in range(2):
            output = module(torch.ones(2))
            dump("twice", {"a": output})
        output.backward()
    names = [(name, call) for _, name, call in written.puts]
    assert sorted(names) == sorted(set(names))
    assert set(names) == {
        *(("output:0", call) for call in (0, 1)),
        *(("output:1", call) for call in (0, 1)),
        *(("value:twice[a]", call) for call in (0, 1)),
        ("grad_output:0", 1),
        ("grad_output:1", 1),
    }
    recorder.at(Moment(8, 0))
    recorder.begin_pass()
    module(torch.ones(2))
    assert [(moment.step, name) for moment, name, _ in written.puts[-2:]] == [(8, "output:0"), (8, "output:1")]
    deactivate(recorder)
    dump("after", output)
    assert written.puts[-1][1] == "output:1"


def test_gradients_belong_to_the_moment_of_their_forward_pass() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    written, recorder, _ = recording(module, "grad_output:*")
    losses = []
    for micro_batch in (0, 1):
        recorder.at(Moment(0, micro_batch))
        recorder.begin_pass()
        losses.append(module(torch.ones(2)))
    losses[0].backward()
    assert written.puts == [(Moment(0, 0), "grad_output:0", 0)]


def test_a_batch_that_does_not_count_leaves_nothing_but_that_there_was_none() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    written, recorder, _ = recording(module)
    recorder.at(Moment(0, 0))
    recorder.begin_pass(counts=False)
    module(torch.ones(2)).backward()
    assert written.puts == []
    recorder.end_batch()
    recorder.end_batch()
    assert written.puts == [(Moment(0, 0), "no_batch:", 0)]
    recorder.at(Moment(1, 0))
    for counts in (False, True, False):  # of others' batches, too, in the same step
        recorder.begin_pass(counts=counts)
    recorder.end_batch()
    assert len(written.puts) == 1


def test_hooks_are_on_what_is_selected_and_leave_with_it() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 1)))

    def hooked() -> list[Any]:
        return [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]

    _, _, hooks = recording(module, "output:*@Linear", "!output:0")
    assert hooked() == ["2.0"]
    hooks.remove()
    hooks.remove()
    assert hooked() == []
