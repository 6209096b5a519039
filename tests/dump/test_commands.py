"""What the command line says of dumps, and how it ends."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from lightning_ft import cli
from lightning_ft.dump.background import Background
from lightning_ft.dump.diff import compare
from lightning_ft.dump.index import Moment
from lightning_ft.dump.layout import Attempt, begin_attempt
from lightning_ft.dump.writer import PartWriter


def write(directory: Path, steps: list[dict[str, Tensor]], part: int = 0, num_parts: int = 1, path: Any = None) -> Path:
    path = path or begin_attempt(directory, Attempt("model", "train", 0, "run", num_parts, 1e9))
    background = Background(1000)
    writer = PartWriter(path, part, background)
    for step, tensors in enumerate(steps):
        for name, tensor in tensors.items():
            writer.put(Moment(step, 0), name, tensor)
    writer.finish()
    writer.close()
    background.close()
    return path


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["dump", *line.split()])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


STEPS = [{"output:net.0": torch.tensor([1.0, 2.0]) + step, "output:net.1": torch.tensor([3.0])} for step in range(3)]


def test_diff_tells_the_first_divergence_and_ends_with_0_1_or_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, STEPS)
    write(b, STEPS)
    assert run(f"diff {a} {b}", capsys)[:2] == (0, "6 compared, 0 different, 0 missing, 0 extra.\n")
    changed = [dict(step) for step in STEPS]
    changed[1]["output:net.1"] = torch.tensor([3.25])
    changed[2]["output:net.0"] = torch.tensor([float("nan"), 4.0])
    changed[2]["output:net.2"] = torch.ones(1)
    del changed[0]["output:net.0"]
    b = tmp_path / "c"
    write(b, changed)
    page = tmp_path / "page.html"
    code, out, _ = run(f"diff {b} {a} --html {page}", capsys)
    root = ElementTree.fromstring(page.read_text().replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    assert "First divergence: output:net.1" in "".join(root.itertext())
    assert len(root.findall(".//figure")) == 2, "how values of both differences are distributed"
    squares = [square.findtext("title") for square in root.findall(".//rect") if square.find("title") is not None]
    assert "model/train output:net.1, step 1: 0.25" in squares
    assert len(squares) == 5
    assert code == 1
    assert out.splitlines()[0] == (
        "First divergence: output:net.1 (model/train/rollout_0, step 1, batch 0): max abs 0.25, max rel 0.0769,"
        " cosine 1.000000."
    )
    rows = [line.split() for line in out.splitlines()[3:5]]
    assert rows == [
        ["output:net.1", "model/train/rollout_0", "1", "0", "0.25", "0.0769", "1.000000", "0/0"],
        ["output:net.0", "model/train/rollout_0", "2", "0", "nan", "nan", "1.000000", "1/0"],
    ]
    assert "Only in" in out
    assert out.endswith("5 compared, 2 different, 1 missing, 1 extra.\n")
    assert run(f"diff {a} {b} --atol 0.3 --only output:net.1", capsys)[0] == 0
    (a / "model/train/rollout_0/attempt_1/part_00000.jsonl").write_bytes(b"")
    code, _, err = run(f"diff {a} {b}", capsys)
    assert (code, "part_00000.jsonl does not match its checksum" in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ls DIR/nowhere", "The dump DIR/nowhere can't be read: it does not exist."),
        ("ls DIR/empty", "The dump DIR/empty can't be read: there is no attempt of a rollout in it."),
        ("show DIR/a output:net.7", "nothing in it is called `output:net.7`."),
        ("show DIR/a output:net.1 --step 99", "`output:net.1` is in 3 steps from 0 to 2, not in step 99."),
        ("diff DIR/a DIR/nowhere", "The dump DIR/nowhere can't be read: it does not exist."),
        ("diff DIR/a DIR/a --only nothing", "neither it nor DIR/a has anything of the names that were asked for."),
        (
            "diff DIR/a DIR/a/model",
            "The dump DIR/a can't be compared: it has nothing in common with DIR/a/model; compare those",
        ),
        ("diff DIR/a DIR/a --rtol -1", "argument --rtol: expected a number, 0 or more: -1"),
        ("diff DIR/a DIR/a --atol nan", "argument --atol: expected a number, 0 or more: nan"),
        ("diff DIR/a DIR/a --html DIR/none/x.html", "`--html DIR/none/x.html` can't be written: DIR/none is no directory."),
    ],
)
def test_what_can_not_be_done_is_explained_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    write(tmp_path / "a", STEPS)
    (tmp_path / "empty").mkdir()
    code, out, err = run(line.replace("DIR", str(tmp_path)), capsys)
    assert (code, out) == (2, "")
    assert message.replace("DIR", str(tmp_path)) in err


def test_batches_of_other_sizes_are_told_to_be_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size in (("a", 8), ("b", 16)):
        write(tmp_path / name, [{"output:net": torch.ones(size, 3), "parameter:w": torch.ones(2)}])
    code, out, _ = run(f"diff {tmp_path / 'a'} {tmp_path / 'b'}", capsys)
    assert code == 1
    assert "shape [8, 3] against [16, 3]" in out
    assert "First dimensions differ by a factor of 2: only the first replica writes" in out


def test_ls_and_show_tell_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, STEPS)
    begin_attempt(tmp_path, Attempt("model", "train", 0, "run", 1, 1e9))
    code, out, _ = run(f"ls {tmp_path} --verify", capsys)
    _, whole, begun = (line.split() for line in out.splitlines())
    assert (code, whole[:8]) == (0, ["model", "train", "0", "1", "1", "0-2", "6", "0.0"])
    assert begun[-2:] == ["not", "whole"]
    code, out, _ = run(f"show {tmp_path} output:net.0 --step 2", capsys)
    assert out.splitlines()[1].split() == (
        ["output:net.0", "model/train/rollout_0", "2", "0", "0", "[2]", "float32", "3", "4", "3.5", "0"]
    )
    code, _, err = run(f"show {tmp_path} output:net.7", capsys)
    assert (code, "nothing in it is called `output:net.7`" in err) == (2, True)
    tensors = path / "part_00000.tensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    code, out, _ = run(f"ls {tmp_path} --verify", capsys)
    assert (code, "damaged: `output:net.1` in step 2 does not match its checksum" in out) == (1, True)


@pytest.mark.parametrize("parts", [(slice(0, 2), slice(2, 4)), (slice(0, 4, 2), slice(1, 4, 2))])
def test_dumps_of_one_rank_and_of_two_are_put_together(tmp_path: Path, parts: tuple[slice, slice]) -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    first, second = (rows[part] for part in parts)
    whole = {"output:net": rows, "grad_output:net": rows, "loss:": torch.tensor(2.0), "parameter:w": torch.ones(2)}
    write(tmp_path / "a", [whole])
    halves = [
        {"output:net": first, "grad_output:net": 2 * first, "loss:": torch.tensor(1.0), "parameter:w": torch.ones(2)},
        {"output:net": second, "grad_output:net": 2 * second, "loss:": torch.tensor(3.0)},
    ]
    path = write(tmp_path / "b", [halves[0]], num_parts=2)
    write(tmp_path / "b", [halves[1]], part=1, path=path)
    assert compare(tmp_path / "a", tmp_path / "b").is_equal
    assert compare(tmp_path / "b", tmp_path / "b").is_equal


def test_other_dtypes_are_compared_by_value_and_other_shapes_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"output:x": torch.tensor([1 / 3, 2.0]), "output:y": torch.ones(2), "output:z": torch.ones(2)}])
    other = {"output:x": torch.tensor([1 / 3, 2.0]).bfloat16(), "output:y": torch.ones(2).double()}
    write(tmp_path / "b", [{**other, "output:z": torch.ones(3)}])
    comparison = compare(tmp_path / "a", tmp_path / "b")
    x, y, z = comparison.rows
    assert (x.is_equal, x.dtypes, y.is_equal) == (False, ("float32", "bfloat16"), True)
    assert z.problem == "shape [2] against [3]"
    assert compare(tmp_path / "a", tmp_path / "b", rtol=1e-2).differences == [z]
