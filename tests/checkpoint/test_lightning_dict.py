import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_ft.checkpoint.dcp_reading import read_flat, unflatten
from lightning_ft.checkpoint.lightning_dict import join, read_checkpoint, read_meta, restore_tensors, split
from lightning_ft.errors import DamagedCheckpointError


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other), path
        assert len(one) == len(other), path
        for index, value in enumerate(one):
            assert_same(value, other[index], f"{path}[{index}]")
    else:
        assert one == other, path


def test_a_directory_gives_back_the_checkpoint_that_was_saved(save: Callable[..., Path], checkpoint: dict[str, Any]) -> None:
    directory = save()
    assert_same(read_checkpoint(directory), checkpoint)
    assert_same(read_checkpoint(directory, weights_only=False), checkpoint)
    meta = read_meta(directory)  # large tensors, such as those of averages, are not in there
    assert isinstance(meta["callbacks"]["Average"]["model"]["2.weight"], dict)
    assert isinstance(meta["callbacks"]["Average"]["model"]["0.bias"], torch.Tensor)
    assert_same(restore_tensors(meta, directory), {key: value for key, value in checkpoint.items() if key in meta})


def test_taking_apart_changes_and_copies_nothing(checkpoint: dict[str, Any]) -> None:
    before = pickle.dumps(checkpoint)
    tensors, meta = split(checkpoint, [None])
    assert pickle.dumps(checkpoint) == before
    assert meta["loops"] is checkpoint["loops"]
    assert tensors["state_dict"]["0.weight"] is checkpoint["state_dict"]["0.weight"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters),
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=2, history_size=2),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), amsgrad=True),
    ],
)
def test_every_optimizer_continues_from_a_directory(tmp_path: Path, named: bool, make: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = make(parameters)

    def step(optimizer: Any, parameters: list[Any]) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = parameters[0].square().sum() + (parameters[2] - 1).square().sum()  # the one in between has no state
            loss.backward()
            return loss

        optimizer.step(closure)

    step(optimizer, parameters)
    step(optimizer, parameters)
    names = [["first", "second", "third"]] if named else [None]
    checkpoint = {
        "state_dict": dict(enumerate(parameters)),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }
    tensors, meta = split({**checkpoint, "state_dict": {}}, names)
    dcp.save(tensors, checkpoint_id=tmp_path / "d", no_dist=True)
    loaded = join(unflatten(read_flat(tmp_path / "d")), meta)

    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    continued = make(others)
    continued.load_state_dict(loaded["optimizer_states"][0])
    for _ in range(2):
        step(optimizer, parameters)
        step(continued, others)
    for parameter, other in zip(parameters, others, strict=True):
        assert torch.equal(parameter, other)


def test_a_checkpoint_of_weights_has_no_optimizers(checkpoint: dict[str, Any]) -> None:
    only = {key: value for key, value in checkpoint.items() if key not in ("optimizer_states", "lr_schedulers", "callbacks")}
    assert_same(join(*split(only, [])), only)
    without_optimizer = {**only, "optimizer_states": [], "lr_schedulers": []}
    assert_same(join(*split(without_optimizer, [])), without_optimizer)


def test_objects_need_the_users_consent(save: Callable[..., Path], checkpoint: dict[str, Any]) -> None:
    checkpoint["hyper_parameters"] = {"where": Path("data")}
    directory = save()
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError, match="Pass `weights_only=False` to the Trainer call"):
            read_checkpoint(directory, weights_only)
    assert read_checkpoint(directory, weights_only=False)["hyper_parameters"] == {"where": Path("data")}


def test_a_distributed_checkpoint_without_lightnings_part_is_named(save: Callable[..., Path]) -> None:
    directory = save()
    (directory / "meta.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"meta\.pt is missing, so Lightning did not save it"):
        read_checkpoint(directory)
