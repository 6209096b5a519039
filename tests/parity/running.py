"""Runs rows, many in a job, and keeps what each left."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import digest_elsewhere
from row import Row

from lightning_ft.testing import FaultPlan, JobResult, run_job, run_without_supervisor

JOB = Path(__file__).parent / "job.py"
OWN_FILES = ("record_", "started_", "samples_", "faults_")
_PER_JOB = 12


@dataclass(frozen=True)
class Outcome:
    """What a row left under one strategy.

    Args:
        records: By rank.
        files: Names and contents.
        error: Why there is nothing to compare.

    """

    records: dict[int, dict[str, Any]]
    files: dict[str, Any]
    error: str = ""


class Batches:
    """Runs rows without faults, several in one job, each at most once in a session."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self._names = names
        self._directory = directory
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, name: str, strategy: str) -> Outcome:
        while (name, strategy) not in self._outcomes:
            first = self._names.index(name)
            names = [n for n in self._names[first:] if (n, strategy) not in self._outcomes][:_PER_JOB]
            self._run(names, strategy)
        return self._outcomes[name, strategy]

    def _run(self, names: list[str], strategy: str) -> None:
        directory = self._directory / f"{strategy}_{len(self._outcomes)}"
        directory.mkdir()
        error = ""
        try:
            job = start(names, strategy, directory, timeout=60.0 + 20.0 * len(names))
            if job.returncode != 0:
                error = f"The job ended with code {job.returncode}.\n{job.tail()}"
        except TimeoutError as timeout:
            error = str(timeout)
        done = [name for name in names if len(list((directory / name).glob("record_*.json"))) == 2]
        for name in done:
            self._outcomes[name, strategy] = read(directory / name)
        if error:  # of the first row that is not done; those after it are run again, in another job
            culprit = next((name for name in names if name not in done), names[-1])
            self._outcomes[culprit, strategy] = Outcome({}, {}, error)


def start(names: list[str], strategy: str, directory: Path, timeout: float) -> JobResult:
    request = _request(names, strategy, 2)
    if strategy != "ddp":
        return run_job(JOB, [request], num_slots=2, directory=directory, timeout=timeout)
    return run_without_supervisor(JOB, [request], num_ranks=2, directory=directory, timeout=timeout)


def start_with_a_death(row: Row, plan: FaultPlan, directory: Path) -> JobResult:
    ft = {"min_replicas": row.kill_devices} if row.joins else {}
    request = _request([row.name], "ft", row.kill_devices, ft)
    return run_job(JOB, [request], num_slots=row.kill_devices, faults=plan, directory=directory)


def _request(names: list[str], strategy: str, devices: int, ft: dict[str, Any] | None = None) -> str:
    return json.dumps({"names": names, "strategy": strategy, "devices": devices, "ft": ft or {}})


def read(directory: Path) -> Outcome:
    records = {}
    for path in sorted(directory.glob("record_*.json")):
        slot, incarnation = path.stem.split("_")[1:]
        records[int(slot)] = {**json.loads(path.read_text()), "incarnation": int(incarnation)}
    files = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file() and not name.startswith(OWN_FILES) and "ft_events" not in path.parts:
            files |= contents(name, path, directory)
    return Outcome(records, files)


def contents(name: str, path: Path, directory: Path) -> dict[str, Any]:
    if path.suffix == ".ckpt":
        checkpoint = torch.load(path, weights_only=False)
        checkpoint.pop("lightning_ft", None)  # where the events are
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("elastic_loaders", None)  # ours only
        checkpoint.get("callbacks", {}).pop("Timer", None)  # it keeps seconds
        return {name: {key: digest_elsewhere(value, directory) for key, value in checkpoint.items()}}
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return {name: list(csv.DictReader(file))}
    if "tfevents" in path.name:
        return {str(Path(name).parent / "events"): "there"}  # its name has the time and the process in it
    return {name: path.read_text(errors="replace").replace(str(directory), ".")}
