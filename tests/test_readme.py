"""Runs every code block of the README."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from lightning_ft.events.audit import audit
from lightning_ft.testing import run_job

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_every_block_is_of_a_kind_that_is_run_here():
    assert {language for language, _ in BLOCKS} == {"bash", "python"}
    assert len(PYTHON) == 3


@pytest.mark.parametrize("target", sorted({line.split()[1] for line in COMMANDS if line.startswith("make ")}))
def test_make_target_exists_and_runs_the_programs_of_its_own_environment(target):
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/" in shown
    for program in re.findall(r"python (\S+\.py)", shown):
        assert (ROOT / program).is_file()


def test_other_commands_are_the_ones_that_make_runs_too():
    others = [line for line in COMMANDS if not line.startswith("make ")]
    assert all(re.fullmatch(r"pip install -e \.|python -m benchmarks\.\w+( --\S+ \S+)*", line) for line in others)
    for module in re.findall(r"benchmarks\.(\w+)", "\n".join(others)):
        assert (ROOT / "benchmarks" / f"{module}.py").is_file()


def test_first_program_trains_and_the_last_reports_on_it(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(PYTHON[0])
    result = run_job(script, num_slots=2, directory=tmp_path).check()
    record = audit(result.events)
    assert (len(record.steps), record.problems()) == (32, [])
    (directory,) = {path.parent for path in tmp_path.glob("**/supervisor.jsonl")}
    namespace: dict = {}
    exec(PYTHON[2], namespace)
    namespace["report"](directory)
    assert capsys.readouterr().out == "0 deaths, 0 returns, 32 steps, problems: []\n"


def test_program_with_callbacks_resumes_what_it_saved(tmp_path):
    script = tmp_path / "train.py"
    before, trainer, _ = PYTHON[0].partition("    trainer = ")
    assert trainer
    script.write_text(before + textwrap.indent(PYTHON[1], "    "))
    for epochs in (2, 3):
        script.write_text(script.read_text().replace("max_epochs=2", f"max_epochs={epochs}"))
        job = run_job(script, num_slots=2, directory=tmp_path).check()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch=2-step=40.ckpt"]
    (verdict,) = {(event["step"], event["reason"], event["outcome"]) for event in job.events if event["event"] == "verdict"}
    assert verdict == (30, "resume", "continuous")


def test_every_linked_file_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
