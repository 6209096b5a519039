import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import cli


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return what the process would have become, in a directory with a script."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    commands: list[Any] = []
    monkeypatch.setattr(cli, "exec_supervisor", lambda *args, **kwargs: commands.append((*args, kwargs)))
    return commands


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("run -n 4 train.py --lr 1 -n 2", ["train.py", "--lr", "1", "-n", "2"]),
        ("run -n 4 -- train.py", ["train.py"]),
        ("run -n 4 -m pkg.train x", ["-m", "pkg.train", "x"]),
        ("run -n 4 -c pass", ["-c", "pass"]),
        ("run --num-slots 4 -- -m pkg.train -- x", ["-m", "pkg.train", "--", "x"]),
    ],
)
def test_run_passes_the_program_on_as_it_is(executed: list[Any], line: str, program: list[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(line.split())
    assert executed == [(4, program, {"start_method": "auto"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run -n 4", "nothing to run"),
        ("run -n 4 -m", "nothing to run"),
        ("run -n 0 train.py", "expected an integer, 1 or more, not 0"),
        ("run -n x train.py", "expected an integer, 1 or more, not x"),
        ("run -n 2 trian.py", "trian.py does not exist; expected train.py, -m MODULE or -c CODE"),
        ("run -n 2 --start-method thread train.py", "invalid choice: 'thread'"),
        ("run train.py", "required"),
        ("", "required"),
    ],
)
def test_wrong_command_line_is_explained(
    executed: list[Any], capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert message in capsys.readouterr().err
    assert executed == []


def test_start_method_is_passed_on(executed: list[Any]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", "-n", "2", "--start-method", "spawn", "train.py"])
    assert executed == [(2, ["train.py"], {"start_method": "spawn"})]
    assert "lightning_ft" in sys.modules
