"""Jobs started in all the ways in which Python programs are started, and those that can't work."""

import json
import multiprocessing
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft import FTStrategy, cli
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.strategies.takeover import check_takeover, hydra_overrides
from lightning_ft.supervision.other_launchers import other_launcher
from lightning_ft.testing.processes import fork_server

ROOT = Path(__file__).parent.parent
JOBS = Path(__file__).parent / "strategies" / "jobs"
ONE_SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def python(*program: str, cwd: Path, env: dict[str, str | None] | None = None) -> tuple[int, str]:
    """Run a program as the interpreter does; return its exit code and its output. Variables that are None are not set."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(JOBS)]), "OMP_NUM_THREADS": "1", **(env or {})}
    environ = {name: value for name, value in variables.items() if value is not None}
    environ.pop("PYTEST_CURRENT_TEST", None)
    output, errors = cwd / "stdout", cwd / "stderr"
    process = fork_server().start(program, environ, cwd, output, errors)
    try:
        code = process.wait(170.0)
    finally:
        process.kill_tree()
    text = output.read_text() + errors.read_text()
    assert code is not None, f"{program} did not end:\n{text}"
    return code, text


def ended(output: str) -> list[dict[str, Any]]:
    """Return what the ranks said at their end, by rank."""
    lines = re.findall(r"^\[slot \d\] ended (.*)$", output, re.M)
    return sorted(map(json.loads, lines), key=lambda line: int(line["rank"]))


def test_module_under_a_single_slurm_task_trains_and_what_it_starts_is_not_taken_for_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import os\nimport anywhere\nanywhere.train()\n"
        "if os.environ['LIGHTNING_FT_SLOT'] == '1':\n    anywhere.train_in_child()\n"
    )
    code, output = python("-m", "pkg.train", "a b", cwd=tmp_path, env=ONE_SLURM_TASK)
    assert code == 0, output
    expected = {"world_size": 2, "argv": [str(package / "train.py"), "a b"], "cwd": str(tmp_path)}
    assert ended(output) == [{"rank": rank, **expected} for rank in range(2)]
    children = [line for line in output.splitlines() if line.startswith("[slot 1] child ended")]
    assert len(children) == 1, output
    assert '"rank": 0, "world_size": 1' in children[0]


@pytest.mark.parametrize("given", [None, "1"])
def test_ranks_share_the_cores_as_under_ddp_unless_the_user_sets_a_number(tmp_path: Path, given: str | None) -> None:
    expected = given or len(os.sched_getaffinity(0))
    code = "import anywhere, torch\nanywhere.train(1)\nprint('threads', torch.get_num_threads())"
    job = ("-m", "lightning_ft.cli", "run", "-n", "1", "-c", code)
    status, output = python(*job, cwd=tmp_path, env={"OMP_NUM_THREADS": given})
    assert status == 0, output
    assert f"threads {expected}\n" in output


def test_what_a_rank_starts_is_not_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RankEnvironment(1, 0, 2, "@nowhere", "@nowhere", "run")
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert RankEnvironment.of_process() == environment
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    assert RankEnvironment.of_process() is None


HYDRA = """
import sys
from types import SimpleNamespace

class HydraConfig:
    @staticmethod
    def initialized():
        return True

    @staticmethod
    def get():
        runtime = SimpleNamespace(output_dir='/where/the "first" ran', cwd="/typed/here")
        return SimpleNamespace(mode=SimpleNamespace(name="RUN"), runtime=runtime)
"""


def test_archive_without_a_main_guard_that_changes_directory_runs_again_where_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("hydra/__init__.py", "")
        archive.writestr("hydra/core/__init__.py", "")
        archive.writestr("hydra/core/hydra_config.py", HYDRA)
        archive.writestr(
            "__main__.py",
            "import os\nimport anywhere\nimport hydra.core.hydra_config\nos.chdir('elsewhere')\nanywhere.train()\n",
        )
    code, output = python("app.pyz", "lr=1", cwd=tmp_path)
    assert code == 0, output
    overrides = ['hydra.run.dir="/where/the \\"first\\" ran"', "hydra.output_subdir=null"]
    expected = {"world_size": 2, "argv": ["app.pyz", "lr=1", *overrides], "cwd": str(tmp_path / "elsewhere")}
    assert ended(output) == [{"rank": rank, **expected} for rank in range(2)]


def test_torchrun_with_one_process_trains(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node")
    code, output = python(*torchrun, "1", str(JOBS / "anywhere.py"), cwd=tmp_path)
    assert code == 0, output
    assert [(line["rank"], line["world_size"]) for line in ended(output)] == [(0, 2), (1, 2)]


def test_torchrun_with_two_processes_is_refused_in_both(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node")
    code, output = python(*torchrun, "2", str(JOBS / "anywhere.py"), cwd=tmp_path)
    assert code == 1
    assert "one of 2 that torchrun started (`WORLD_SIZE=2`)" in output
    assert "torchrun --nproc-per-node 1 train.py" in output
    assert "devices=2" in output


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"WORLD_SIZE": "4", "RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, ("4 that torchrun", "--nproc-per-node 1")),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, ("2 that srun", "SLURM_NTASKS=2", "--ntasks=1")),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_STEP_NUM_TASKS=2", "devices=2")),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, ("3 that mpirun", "mpirun -n 1")),
        ({"PMI_SIZE": "2"}, ("mpirun",)),
        ({"MV2_COMM_WORLD_SIZE": "2"}, ("mpirun",)),
        ({"JSM_NAMESPACE_SIZE": "6"}, ("6 that jsrun", "jsrun -n 1")),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "job-master"}, ("another launcher", "WORLD_SIZE=2")),
    ],
)
def test_one_of_several_processes_is_told_to_be_the_only_one(
    environ: dict[str, str], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match=r"starts and watches its own ranks, on one machine") as raised:
        FTStrategy()
    assert all(part in str(raised.value) for part in parts), raised.value
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "-n", "2", "train.py"])
    assert parts[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "environ",
    [
        {},
        ONE_SLURM_TASK,
        {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "", "WORLD_SIZE": "many"},
    ],
)
def test_only_process_of_a_launcher_is_welcome(environ: dict[str, str]) -> None:
    assert other_launcher(environ) is None


def test_place_that_cannot_start_ranks_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str) -> None:
        with pytest.raises(MisconfigurationException, match=match):
            check_takeover(3)

    refused(r"devices=3.*from within pytest.*lightning-ft run -n 3 train.py.*devices=1")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for program in (["-m", "pdb", "train.py"], ["-m", "debugpy", "--listen", "1", "train.py"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", *program])
        refused(r"within a debugger.*devices=1.*breakpoint\(\)")
    for program in ([], ["-"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", *program])
        refused("from within a program that was read from stdin.*lightning-ft run -n 3 train.py")
    for module in ("spawn", "forkserver"):  # a worker that imports an unguarded script
        code = f"from multiprocessing.{module} import main; main()"
        monkeypatch.setattr(sys, "orig_argv", ["python", "-c", code, "--multiprocessing-fork"])
        refused(r"`multiprocessing` started.*__main__.*devices=1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    check_takeover(3)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    refused(r"within an interactive session.*lightning-ft run -n 3")
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    refused("within an interactive session")
    monkeypatch.delattr(sys, "ps1")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    refused(r"takes part in a process group.*script of its own")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    refused(r"`multiprocessing` started.*__main__.*devices=1")


def test_notebook_trains_on_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=FTStrategy(), default_root_dir=tmp_path, logger=False)
    assert trainer.strategy.launcher is not None


def test_hydra_sweep_goes_on_in_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hydra_overrides() == []
    module: dict[str, Any] = {}
    exec(HYDRA, module)
    config = module["HydraConfig"].get()
    config.mode.name, config.sweep = "MULTIRUN", type("Sweep", (), {"dir": "multirun/now"})
    monkeypatch.setattr(module["HydraConfig"], "get", lambda: config)
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", type("Module", (), module))  # type: ignore[arg-type]
    assert hydra_overrides() == ['hydra.sweep.dir="/typed/here/multirun/now"']


def test_plugins_that_contradict_the_strategy_are_refused() -> None:
    def trainer(plugin: Any) -> Trainer:
        return Trainer(accelerator="cpu", devices=2, strategy=FTStrategy(), plugins=[plugin], logger=False)

    assert trainer(LightningEnvironment()).num_devices == 2
    with pytest.raises(MisconfigurationException, match=r"plugins=\[KubeflowEnvironment\(\)\].*starts its own ranks"):
        trainer(KubeflowEnvironment())
    with pytest.raises(MisconfigurationException, match=r"FSDPPrecision.*belongs to another strategy"):
        trainer(FSDPPrecision("bf16-mixed"))
