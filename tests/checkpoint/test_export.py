import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_ft import cli
from lightning_ft.checkpoint.export import export_checkpoint, export_safetensors


def run(line: str) -> int | str | None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["ckpt", *line.split()])
    return ending.value.code


def test_a_directory_becomes_the_file_that_lightning_would_have_saved(
    save: Callable[..., Path], checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    directory = save()
    export_checkpoint(directory, tmp_path / "out.ckpt")
    exported = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert exported.keys() == checkpoint.keys()
    assert exported["hyper_parameters"] == checkpoint["hyper_parameters"]
    for name, value in checkpoint["state_dict"].items():
        assert torch.equal(exported["state_dict"][name], value)
    (mine,), (its,) = exported["optimizer_states"], checkpoint["optimizer_states"]
    assert mine["param_groups"] == its["param_groups"]
    assert {number: state["exp_avg"].sum() for number, state in mine["state"].items()} == {
        number: state["exp_avg"].sum() for number, state in its["state"].items()
    }


def test_safetensors_hold_weights_and_buffers_of_directories_and_files(
    save: Callable[..., Path], checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    state = checkpoint["state_dict"]
    state["tied"] = state["0.weight"]
    state["0._extra_state"] = {"scale": 1}
    torch.save(checkpoint, tmp_path / "single.ckpt")
    for source in (save(), tmp_path / "single.ckpt"):
        assert export_safetensors(source, tmp_path / "out.safetensors") == ["0._extra_state"]
        loaded = load_file(tmp_path / "out.safetensors")
        assert loaded.keys() == state.keys() - {"0._extra_state"}
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())


def test_commands_tell_what_is_there_and_what_is_damaged(
    save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"ls {tmp_path}") == 0
    assert "There is no checkpoint" in capsys.readouterr().out
    good, bad = save("step=1.ckpt", step=1), save("step=2.ckpt", step=2)
    stock = tmp_path / "stock.ckpt"
    shutil.copytree(good, stock, ignore=shutil.ignore_patterns("manifest.json", "rank-*"))
    torch.save({}, tmp_path / "single.ckpt")
    shutil.copytree(good, tmp_path / "epoch=0-val" / "loss=1.ckpt")
    (bad / "meta.pt").write_bytes(b"")
    assert run(f"ls {tmp_path}") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert next(iter(lines)) == "NAME"
    assert lines.keys() == {"NAME", "single.ckpt", "stock.ckpt", "step=2.ckpt", "step=1.ckpt", "epoch=0-val/loss=1.ckpt"}
    assert "damaged: meta.pt has 0 bytes instead of" in lines["step=2.ckpt"]
    assert lines["stock.ckpt"].endswith("no manifest")

    assert run(f"verify {good} {stock}") == 0
    out = capsys.readouterr().out
    assert f"{good}: intact\n" in out
    assert f"{stock}: no manifest; intact" in out
    assert run(f"verify {tmp_path} --sizes") == 1
    assert f"{bad}: damaged: meta.pt" in capsys.readouterr().out
    assert run(f"verify {tmp_path / 'none'}") == 1

    assert run(f"export {good} {tmp_path}/out.ckpt") == 0
    assert "MB" in capsys.readouterr().out
    assert "its directory does not exist: '" in str(run(f"export {good} {tmp_path}/none/out.ckpt")).replace("]", "]")
    assert "there is a directory of this name" in str(run(f"export {good} {good}"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        told = [str(run(f"export {good} {tmp_path}/full.ckpt {option}")) for option in ("", "--safetensors")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all("The file can't be written: " in line and "File too large" in line for line in told), told
    assert not [path for path in tmp_path.iterdir() if "full" in path.name]
    assert f"{tmp_path}/none is no directory." in str(run(f"ls {tmp_path}/none"))
    assert "is damaged: meta.pt" in str(run(f"export {bad} {tmp_path}/bad.ckpt"))
    assert not (tmp_path / "bad.ckpt").exists()

    (tmp_path / "notes").mkdir()
    assert "notes is no checkpoint. Nothing was removed." in str(run(f"rm {bad} {tmp_path}/notes"))
    assert bad.exists()
    assert run(f"rm {bad} {tmp_path}/single.ckpt") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch=0-val",
        "notes",
        "out.ckpt",
        "step=1.ckpt",
        "stock.ckpt",
    ]


def test_objects_are_exported_when_they_are_trusted(
    save: Callable[..., Path], checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint["hyper_parameters"] = {"where": Path("data")}
    directory = save()
    assert "On the command line that is --trust." in str(run(f"export {directory} {tmp_path}/out.ckpt"))
    assert run(f"export {directory} {tmp_path}/out.ckpt --trust") == 0
    assert torch.load(tmp_path / "out.ckpt", weights_only=False)["hyper_parameters"] == {"where": Path("data")}
