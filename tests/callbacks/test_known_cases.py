"""Each known way in which Lightning alone resumes wrongly in the middle of an epoch, or stops, has its right outcome here.

The numbers are those of a list that was measured with Lightning 2.6: it replays batches, leaves some out or skips an epoch.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*found in the checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning"),
    # It leaves queues of its workers to the garbage collection, which closes them in any order.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]


class Rows(IterableDataset[Tensor]):
    """A stream without a length whose workers know where they are, as those of HuggingFace's datasets do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        begin, self.at = self.at, 0
        for number in range(first + begin * step, 29, step):
            begin += 1
            self.at = begin
            yield torch.tensor([float(number), 0.5])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


BATCHES = ("on_train_batch_end",)
QUICK: dict[str, Any] = {"hooks": BATCHES, "num_validation": 0, "every": 3}


@pytest.fixture(params=["auto", "ft"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("shuffle", "num_workers"), [(False, 0), (True, 2)])
def test_1_2_and_13_map_style_loaders(
    tmp_path: Path, resumed: ModuleType, strategy: str, shuffle: bool, num_workers: int
) -> None:
    for name, loader_type in (("plain", DataLoader), ("stateful", StatefulDataLoader)):
        (tmp_path / name).mkdir()
        loader = lambda kind=loader_type: kind(resumed.Numbers(14), 3, shuffle=shuffle, num_workers=num_workers)  # noqa: E731
        resumed.assert_resumable(tmp_path / name, loader, strategy=strategy, **{**QUICK, "every": 6, "first": 3})


@pytest.mark.parametrize("loader_type", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_3_streams_without_a_length_lose_no_batch(
    tmp_path: Path, resumed: ModuleType, strategy: str, num_workers: int, loader_type: Any
) -> None:
    loader = lambda: loader_type(Rows(), 3, num_workers=num_workers)  # noqa: E731
    resumed.assert_resumable(tmp_path, loader, strategy=strategy, **{**QUICK, "every": 7, "first": 4})


def test_4_checkpoint_of_the_last_batch_leaves_the_next_epoch_whole(
    tmp_path: Path, resumed: ModuleType, strategy: str
) -> None:
    loader = lambda: StatefulDataLoader(resumed.Numbers(14), 3, shuffle=True)  # noqa: E731
    last = {"every": 5, "first": 4, "max_epochs": 3}
    for number, options in enumerate(({}, {"accumulate_grad_batches": 2}, {"max_steps": 13, "max_epochs": -1})):
        directory = tmp_path / str(number)
        directory.mkdir()
        resumed.assert_resumable(directory, loader, strategy=strategy, **{**QUICK, **last, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader_type", [DataLoader, StatefulDataLoader])
def test_5_distributed_sampler_goes_on_with_the_order_of_its_epoch(
    tmp_path: Path, resumed: ModuleType, strategy: str, num_workers: int, loader_type: Any
) -> None:
    data = resumed.Numbers(14)

    def loader() -> Any:
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=3)
        return loader_type(data, 3, sampler=sampler, num_workers=num_workers)

    resumed.assert_resumable(tmp_path, loader, strategy=strategy, **{**QUICK, "first": 6, "every": 3})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_6_epochs_after_the_resumed_one_draw_from_the_generator_as_they_would_have(
    tmp_path: Path, resumed: ModuleType, strategy: str, num_workers: int
) -> None:
    def loader() -> Any:
        generator = torch.Generator().manual_seed(4)
        return StatefulDataLoader(resumed.Numbers(14), 3, shuffle=True, generator=generator, num_workers=num_workers)

    resumed.assert_resumable(tmp_path, loader, strategy=strategy, **{**QUICK, "first": 2, "every": 7, "max_epochs": 3})


class OwnSampler:
    """With a generator of its own, which is not that of the run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Any:
        return iter(torch.randperm(14, generator=self.generator).tolist())


@pytest.mark.parametrize("several", ["ddp", "ft"])
def test_5_sampler_of_the_user_around_which_lightning_puts_a_distributed_one(
    tmp_path: Path, resumed: ModuleType, several: str
) -> None:
    loader = lambda: DataLoader(resumed.Numbers(14), 3, sampler=OwnSampler())  # noqa: E731
    try:
        resumed.assert_resumable(tmp_path, loader, strategy=several, **{**QUICK, "first": 2, "every": 5, "max_epochs": 3})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_7_loaders_that_are_asked_for_early_have_their_position(tmp_path: Path, resumed: ModuleType, strategy: str) -> None:
    class Model(resumed.Model):  # type: ignore[misc,name-defined]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps), "interval": "step"}
            ]

    for name, loader in (("order", lambda: DataLoader(resumed.Numbers(14), 3, shuffle=True)), ("own", Stream)):
        (tmp_path / name).mkdir()
        resumed.assert_resumable(tmp_path / name, loader, strategy=strategy, model_type=Model, **{**QUICK, "every": 5})


class Stream:
    """Has a length and knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        self.at %= 5  # whoever knows the length does not ask for the end
        while self.at < 5:
            self.at += 1
            yield torch.tensor([[float(self.at), 0.5], [self.at + 1.0, 0.2]])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (0, 2)])
def test_8_another_number_of_workers_continues(
    tmp_path: Path, resumed: ModuleType, strategy: str, before: int, after: int
) -> None:
    def loader(num_workers: int) -> Callable[[], Any]:
        return lambda: StatefulDataLoader(resumed.Numbers(14), 3, shuffle=True, num_workers=num_workers)

    options = {"strategy": strategy, "num_validation": 0}
    whole = resumed.fit(tmp_path, loader(before), hooks=BATCHES, **options)
    name = list(whole.taken)[6]
    other = resumed.fit(tmp_path, loader(after), ckpt=name, **options)
    assert [row[3] for row in other.trace] == [row[3] for row in whole.trace[whole.taken[name][0] :]]


def test_10_validation_is_neither_left_out_nor_run_twice(tmp_path: Path, resumed: ModuleType, strategy: str) -> None:
    loader = lambda: DataLoader(resumed.Numbers(14), 3, shuffle=True)  # noqa: E731
    places = ("on_train_batch_end", "on_validation_start", "on_validation_batch_end")
    options = {**QUICK, "hooks": places, "num_validation": 4, "val_check_interval": 2, "every": 2}
    resumed.assert_resumable(tmp_path, loader, strategy=strategy, **options)


def test_11_later_epochs_of_persistent_workers_keep_their_length(tmp_path: Path, resumed: ModuleType, strategy: str) -> None:
    loader = lambda: DataLoader(Rows(), 3, num_workers=2, persistent_workers=True)  # noqa: E731
    resumed.assert_resumable(tmp_path, loader, strategy=strategy, **{**QUICK, "every": 12, "first": 3, "max_epochs": 3})


def test_12_a_step_that_takes_its_batches_itself(tmp_path: Path, resumed: ModuleType, strategy: str) -> None:
    class Model(resumed.Model):  # type: ignore[misc,name-defined]
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, batch_size=3, **kwargs)

        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    loader = lambda: DataLoader(resumed.Numbers(14), 3, shuffle=True)  # noqa: E731
    resumed.assert_resumable(tmp_path, loader, strategy=strategy, model_type=Model, **QUICK)
