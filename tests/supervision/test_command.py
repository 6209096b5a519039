import sys

import pytest

from lightning_ft.supervision import command


@pytest.mark.parametrize(
    ("line", "flags", "program"),
    [
        ("train.py -m x", "", "train.py -m x"),
        ("-u train.py", "-u", "train.py"),
        ("-m pkg.mod -c x", "", "-m pkg.mod -c x"),
        ("-mpkg.mod x", "", "-m pkg.mod x"),
        ("-um pkg.mod -x", "-u", "-m pkg.mod -x"),
        ("-uc code x", "-u", "-c code x"),
        ("-OuW error -m mod", "-OuW error", "-m mod"),
        ("-W error -Xdev -X importtime train.py", "-W error -Xdev -X importtime", "train.py"),
        ("-Werror::DeprecationWarning -c x", "-Werror::DeprecationWarning", "-c x"),
        ("-Wm -m mod", "-Wm", "-m mod"),
        ("--check-hash-based-pycs always train.py", "--check-hash-based-pycs always", "train.py"),
        ("- x", "", "- x"),
        ("-u", "-u", ""),
        ("", "", ""),
    ],
)
def test_command_line_is_split_as_the_interpreter_does(line: str, flags: str, program: str) -> None:
    assert command.split(["python", *line.split()]) == (flags.split(), program.split())


def test_supervisor_gets_the_flags_and_the_program_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-Xdev", "-um", "pkg.train", "--n", "2"])
    supervisor = [sys.executable, "-Xdev", "-u", "-m", "lightning_ft.supervision.supervisor", "--num-slots", "4"]
    assert command.supervisor_command(4) == [*supervisor, "--", "-m", "pkg.train", "--n", "2"]
    expected = [*supervisor, "--start-method", "spawn", "--", "other.py"]
    assert command.supervisor_command(4, ["other.py"], start_method="spawn") == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command.supervisor_command(4, ["other.py"]) == [*supervisor, "--ranks-choose-threads", "--", "other.py"]


def test_supervisor_goes_back_to_where_the_command_was_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    typed_in = tmp_path_factory.mktemp("typed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(command, "_started_in", str(typed_in))
    monkeypatch.chdir(tmp_path_factory.mktemp("moved"))
    assert command.supervisor_command(2, ["train.py"])[-4:] == ["--directory", str(typed_in), "--", "train.py"]
    monkeypatch.chdir(typed_in)
    assert "--directory" not in command.supervisor_command(2, ["train.py"])


@pytest.mark.parametrize("argv", [["python"], ["python", "-i"], ["python", "-"]])
def test_interactive_interpreter_cannot_be_supervised(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    with pytest.raises(ValueError, match="lightning-ft run -n N"):
        command.supervisor_command(2)
