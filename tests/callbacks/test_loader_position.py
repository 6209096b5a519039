"""A fit that is resumed from any of its checkpoints does, bit for bit, what it would have done without the interruption."""

import json
import logging
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_ft.testing import Fault, FaultPlan, run_without_supervisor
from lightning_ft.testing import run_job as run_job_of_ranks

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*found in the checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]


class OwnSampler:
    """Draws from a generator of its own, counts its epochs and may begin later: what users write."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.generator = np.random.default_rng(5)
        self.start = 0
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        order = self.generator.permutation(self.count).tolist()
        self.epoch += 1
        return iter(order[self.epoch :] + order[: self.epoch][self.start :])


class OwnBatches:
    """A batch sampler whose batches are of different sizes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        for number in range(5):
            yield torch.randint(0, 14, (2 + number % 3,), generator=self.generator).tolist()


def make(resumed: ModuleType, count: int = 14, *, noisy: bool = False, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(resumed.Numbers(count, noisy), **{"batch_size": 3, "shuffle": True, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2, "val_check_interval": 1, "max_epochs": 1},
        {"plateau": "epoch", "max_epochs": 3, "num_validation": 0},
        {"plateau": "step", "accumulate_grad_batches": 2},
        {"max_steps": 8, "max_epochs": -1},
    ],
    ids=["epochs", "validations within", "accumulation", "plateau by epoch", "plateau by step", "steps"],
)
def test_a_fit_resumes_exactly_from_every_place_in_it(tmp_path: Path, resumed: ModuleType, options: dict[str, Any]) -> None:
    hooks = resumed.HOOKS[1:]
    resumed.assert_resumable(tmp_path, make(resumed, noisy=True), hooks=hooks, **options)


def test_workers_get_the_same_order_again(tmp_path: Path, resumed: ModuleType) -> None:
    generator = torch.Generator()

    def loader() -> Any:
        return make(resumed, num_workers=2, generator=generator.manual_seed(4))()

    resumed.assert_resumable(tmp_path, loader, every=6, first=1, num_validation=0)


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_outlives_a_fit(resumed: ModuleType, tmp_path: Path, persistent: bool) -> None:
    before, loader = set(multiprocessing.active_children()), make(resumed, num_workers=2, persistent_workers=persistent)()
    fitted = resumed.fit(tmp_path, lambda: loader)
    assert set(multiprocessing.active_children()) <= before  # though what they worked for is still there
    assert fitted.trace


def test_samplers_of_the_user_continue_where_they_were(tmp_path: Path, resumed: ModuleType) -> None:
    (tmp_path / "sampler").mkdir()
    (tmp_path / "batches").mkdir()
    sampler = {"every": 4, "max_epochs": 3, "num_validation": 0}
    data = resumed.Numbers(14)
    resumed.assert_resumable(tmp_path / "sampler", lambda: DataLoader(data, batch_size=3, sampler=OwnSampler(14)), **sampler)
    resumed.assert_resumable(tmp_path / "batches", lambda: DataLoader(data, batch_sampler=OwnBatches()), **sampler)


class Rows(IterableDataset[torch.Tensor]):
    """A stream without a length and without a state."""

    def __iter__(self) -> Any:
        for number in range(14):
            yield torch.tensor([float(number), 0.5])


class Stream:
    """A stream without a length that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 5:
            self.at += 1
            yield torch.tensor([[float(self.at), 0.5], [self.at + 1.0, 0.2]])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Corpus:
    """Makes its batches from the number of the epoch, and any of them by itself."""

    def __iter__(self) -> Any:
        raise AssertionError("not by epoch")
        yield

    def __len__(self) -> int:
        return 5

    def epoch_batches(self, epoch: int) -> Any:
        generator = torch.Generator().manual_seed(epoch)
        return list(torch.rand(5, 2, 2, generator=generator))


@pytest.mark.parametrize(
    "stream", [lambda: DataLoader(Rows(), batch_size=3), Stream, Corpus], ids=["rows", "state", "corpus"]
)
def test_a_stream_loses_no_batch_that_was_read_ahead(tmp_path: Path, resumed: ModuleType, stream: Any) -> None:
    resumed.assert_resumable(tmp_path, stream, every=4)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_several_loaders_continue_side_by_side(tmp_path: Path, resumed: ModuleType, mode: Any) -> None:
    loaders = {"long": make(resumed), "short": make(resumed, 7)}
    resumed.assert_resumable(
        tmp_path, lambda: CombinedLoader({name: loader() for name, loader in loaders.items()}, mode), every=5
    )


class OwnPosition(Callback):
    """What users write to skip what was trained."""

    def __init__(self, sampler: OwnSampler) -> None:
        self.sampler = sampler

    def on_load_checkpoint(self, *args: Any) -> None:
        self.sampler.start = 3


def test_what_the_user_skips_is_not_skipped_twice(tmp_path: Path, resumed: ModuleType) -> None:
    def run(ckpt: str | None = None) -> Any:
        sampler = OwnSampler(14)
        loader = DataLoader(resumed.Numbers(14), batch_size=3, sampler=sampler)
        more: Any = {"callbacks": (OwnPosition(sampler),), "num_validation": 0}
        return resumed.fit(tmp_path, lambda: loader, hooks=("on_train_batch_end",), ckpt=ckpt, **more)

    whole = run()
    name = list(whole.taken)[6]
    assert run(name).trace == whole.trace[whole.taken[name][0] :]


def test_the_number_of_workers_may_change(tmp_path: Path, resumed: ModuleType) -> None:
    whole = resumed.fit(tmp_path, make(resumed), hooks=("on_train_batch_end",), num_validation=0)
    name = list(whole.taken)[6]
    other = resumed.fit(tmp_path, make(resumed, num_workers=2), ckpt=name, num_validation=0, max_epochs=2)
    assert other.trace[:3] == whole.trace[whole.taken[name][0] :]


def test_persistent_workers_get_the_same_order_in_later_epochs(tmp_path: Path) -> None:
    loading = {"num_workers": 2, "persistent_workers": True}
    options = {"num_samples": 14, "every": 5, "first": 1, "max_epochs": 3, "num_validation": 0, "loading": loading}
    run_job(tmp_path, 1, options)


def test_ranks_get_their_own_back_under_ddp(tmp_path: Path) -> None:
    run_job(tmp_path, 2, {"num_samples": 29, "strategy": "ddp", "every": 6, "accumulate_grad_batches": 2})


def test_ranks_get_their_own_back_under_lightnings_strategy_for_fsdp2(tmp_path: Path) -> None:
    hooks = ["on_train_batch_end", "on_validation_end"]
    run_job(
        tmp_path,
        2,
        {"num_samples": 29, "strategy": "fsdp2", "every": 7, "first": 2, "accumulate_grad_batches": 2, "hooks": hooks},
    )


class Ends(Callback):
    """Ends the fit in the middle of its second epoch, and saves then as `OnExceptionCheckpoint` does."""

    def __init__(self, how: str, path: Path) -> None:
        self.how, self.path = how, path

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "exception" and (trainer.current_epoch, batch_idx) == (1, 2):
            raise RuntimeError("on purpose")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "SIGTERM" and (trainer.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("how", "error"), [("exception", RuntimeError), ("SIGTERM", SIGTERMException)])
def test_what_is_saved_as_a_fit_ends_early_is_exact(
    tmp_path: Path, resumed: ModuleType, how: str, error: type[BaseException], accumulate: int
) -> None:
    options = {"num_validation": 0, "max_epochs": 3, "accumulate_grad_batches": accumulate}
    whole = resumed.fit(tmp_path, make(resumed), **options)
    with pytest.raises((error, SystemExit)):
        resumed.fit(tmp_path, make(resumed), callbacks=(Ends(how, tmp_path / "on_exception.ckpt"),), **options)
    rest = resumed.fit(tmp_path, make(resumed), ckpt="on_exception.ckpt", **options)
    at = next(number for number, row in enumerate(whole.trace) if row[:2] == (1, 2))
    assert rest.trace == whole.trace[at:]
    assert all(torch.equal(rest.weights[key], value) for key, value in whole.weights.items())


def run_job(directory: Path, num_ranks: int, options: dict[str, Any]) -> None:
    script = Path(__file__).parent / "jobs" / "resumed.py"
    run_without_supervisor(script, [json.dumps(options)], num_ranks=num_ranks, directory=directory, timeout=170).check()
    assert len(list(directory.glob("done_*"))) == num_ranks


@pytest.mark.parametrize(
    "more",
    [
        {"every": 6, "accumulate_grad_batches": 2},
        {"every": 9, "shard_size": 2, "hooks": ["on_train_batch_end", "on_validation_end"]},
    ],
)
def test_under_ftstrategy_a_fit_resumes_exactly(tmp_path: Path, more: dict[str, Any]) -> None:
    script = Path(__file__).parent / "jobs" / "resumed.py"
    options = {"num_samples": 29, "strategy": "ft", "devices": 2, **more}
    run_job_of_ranks(script, [json.dumps(options)], num_slots=2, directory=tmp_path, timeout=170).check()
    assert len(list(tmp_path.glob("done_*"))) == 2


@pytest.mark.parametrize("strategy", ["auto", "ft"])
def test_more_epochs_than_were_planned_go_on_as_if_they_had_been(tmp_path: Path, resumed: ModuleType, strategy: str) -> None:
    options = {"strategy": strategy, "accumulate_grad_batches": 2}
    whole = resumed.fit(tmp_path, make(resumed, noisy=True), max_epochs=3, **options)
    hooks = ("on_train_batch_end", "on_train_epoch_end", "on_train_end")
    short = resumed.fit(tmp_path, make(resumed, noisy=True), hooks=hooks, max_epochs=1, **options)
    for name in list(short.taken)[4:]:  # from the last batch on
        rest = resumed.fit(tmp_path, make(resumed, noisy=True), ckpt=name, max_epochs=3, **options)
        assert rest.trace == whole.trace[short.taken[name][0] :], name
        assert all(torch.equal(rest.weights[key], value) for key, value in whole.weights.items()), name


def test_a_checkpoint_of_ddp_in_the_middle_of_an_epoch_is_resumed_where_it_was(
    train: Callable[..., Any], train_with_ddp: Callable[..., Any]
) -> None:
    whole = train_with_ddp(callbacks=("Position",))
    options = {"ckpt_path": str(whole.directory / "steps" / "step=15.ckpt"), "checkpoints": False}
    same = train(name="as it is", devices=2, **options)
    same.job.check()
    assert same.results[0]["fingerprint"] == whole.results[0]["fingerprint"]
    other = train(name="on three", devices=3, callbacks=("Position",), **options)
    other.job.check()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(7 + 1)).tolist()
    assert other.trained_samples(2) == [Counter(), Counter(order[3 * 2 * 4 :])]


def test_another_number_of_ranks_trains_what_was_left_of_the_epoch(train: Callable[..., Any], tmp_path: Path) -> None:
    options = {"num_samples": 95, "callbacks": ("Position",), "every_n_train_steps": 1}
    plan = FaultPlan([Fault(kind="kill", slot=1, point="backward_early", step=9)])
    first = train(plan, name="first", max_steps=11, **options)
    first.job.check()
    path = str(tmp_path / "first" / "steps" / "step=11.ckpt")
    second = train(name="on two", devices=2, ckpt_path=path, **options)
    second.job.check()
    assert second.trained_samples(2)[0] == Counter()
    assert first.trained_samples(2)[1] + second.trained_samples(2)[1] == Counter(range(95))
    second.assert_ranks_agree()
    # A single process needs no supervisor; from there on four again.
    (tmp_path / "alone").mkdir()
    alone = {**options, "strategy": "FTStrategy", "devices": 1, "ckpt_path": path, "max_steps": 13}
    script = Path(__file__).parent.parent / "strategies" / "jobs" / "train.py"
    run_without_supervisor(script, [json.dumps(alone)], num_ranks=1, directory=tmp_path / "alone", timeout=170).check()
    lines = [line for file in (tmp_path / "alone").glob("samples_*.jsonl") for line in file.read_text().splitlines()]
    trained = Counter(sample for line in lines for sample in json.loads(line)["samples"])
    assert 4 < trained.total() <= 8
    last = train(name="on four", devices=4, ckpt_path=str(tmp_path / "alone" / "steps" / "step=13.ckpt"), **options)
    last.job.check()
    assert first.trained_samples(2)[1] + trained + last.trained_samples(2)[1] == Counter(range(95))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("error", 'on 2 ranks, but there are 1 now.*"restart_epoch", or, if FTStrategy saved it, "split"'),
        ("split", "`lightning-ft run -n 1`"),
        ("restart_epoch", None),
    ],
)
def test_streams_of_another_number_of_ranks_are_refused_or_begin_again(
    tmp_path: Path, resumed: ModuleType, choice: Any, message: str | None
) -> None:
    resumed.fit(tmp_path, Stream, hooks=("on_train_batch_end",), num_validation=0, strategy="ft", max_epochs=1)
    (path,) = tmp_path.glob("002-*")
    checkpoint = torch.load(path, weights_only=False)
    position = checkpoint["callbacks"]["LoaderPosition"]
    plan = {"version": 2, "epoch": 0, "done": [3, 2]}
    position["ranks"][0]["loaders"] = {"kept": [{"plan": plan, "opened_under": None}], "samplers": [None]}
    torch.save(checkpoint, path)
    options: dict[str, Any] = {"num_validation": 0, "strategy": "ft", "position": choice, "ckpt": path.name, "max_epochs": 1}
    if message is None:
        assert [row[1] for row in resumed.fit(tmp_path, Stream, **options).trace[1:]] == [0, 1, 2, 3, 4]
        return
    with pytest.raises(MisconfigurationException, match=message):
        resumed.fit(tmp_path, Stream, **options)


def test_to_split_streams_under_a_strategy_that_would_hang_is_refused_at_set_up(tmp_path: Path, resumed: ModuleType) -> None:
    with pytest.raises(MisconfigurationException, match="needs FTStrategy"):
        resumed.fit(tmp_path, Stream, num_validation=0, position="split")


def test_another_number_of_ranks_trains_what_was_left_of_every_stream(train_on_streams: Callable[..., Any]) -> None:
    counts = [24, 10, 31, 17]
    options: dict[str, Any] = {"counts": counts, "save_every": 1, "position": "split", "batch_size": 2, "workers": 1}
    first = train_on_streams(name="three", trainer={"max_steps": 3}, **options)
    path = str(first.directory / "steps" / "step=3.ckpt")
    plan = FaultPlan([Fault(kind="kill", slot=1, point="forward", step=11)])
    more: dict[str, Any] = {"ft": {"min_replicas": 2}, "trainer": {"max_steps": 17}}
    second = train_on_streams(plan, name="two", devices=2, ckpt_path=path, **more, **options)
    path = str(second.directory / "steps" / "step=17.ckpt")
    third = train_on_streams(name="four", devices=4, ckpt_path=path, **options)
    alone = train_on_streams(name="one", devices=1, ckpt_path=path, **options)
    for training in (first, second, third, alone):
        training.job.check()
    begun = first.trained_samples(1)[0] + second.trained_samples(1)[0]
    for training, expected in ((third, counts), (alone, counts[:1])):
        left, next_epoch = training.trained_samples(2)
        assert begun + left == all_numbers(counts[:3])
        assert next_epoch == all_numbers(expected)


def all_numbers(counts: list[int]) -> Counter[int]:
    return Counter(1000 * rank + index for rank, count in enumerate(counts) for index in range(count))
