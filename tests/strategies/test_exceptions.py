"""Exceptions of the user's code, wherever they are raised: what becomes of the rank, of the others, of the job."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.testing import JobResult, assert_every_ticket_once, assert_recovered, assert_steps_contiguous, run_job

JOB = Path(__file__).parent / "jobs" / "raising.py"
RAISED = ["Callback.on_exception", "DataModule.on_exception", "Logger.finalize", "atexit"]

# By slot, one place for each of its processes. A process that fails while it joins is followed by one that trains.
PLACES = {
    1: [
        "training_step",
        "Callback.setup",
        "forward",
        "configure_optimizers",
        "backward",
        "DataModule.setup",
        "Callback.on_train_batch_start",
        "Callback.load_state_dict",
        "optimizer_step",
        "on_validation_epoch_end",
    ],
    2: [
        "Dataset.__getitem__",
        "on_fit_start",
        "lr_scheduler_step",
        "configure_model",
        "Optimizer.step",
        "on_load_checkpoint",
        "on_train_epoch_end",
        "Callback.on_train_start",
        "Metric.compute",
        "Callback.on_train_batch_end",
    ],
    3: [
        "collate",
        "DataModule.train_dataloader",
        "on_train_epoch_start",
        "configure_gradient_clipping",
        "Callback.on_before_optimizer_step",
        "transfer_batch_to_device",
        "on_after_backward",
        "validation_step",
        "Metric.update",
        "Callback.on_validation_start",
    ],
}
GROUP = "group@backward" if sys.version_info >= (3, 11) else "chained@backward"
WAYS = {
    1: ["_exit@forward", "abort@training_step", "exit 3@on_train_epoch_end", "interrupt@validation_step"],
    2: ["segfault@forward", "exit text@training_step", "long@Metric.compute", "memory@on_after_backward"],
    3: ["unprintable@forward", "unpicklable@Optimizer.step", "chained@training_step", GROUP],
}
HOW = {
    "_exit": "exit code 3",
    "abort": "SIGABRT",
    "exit 3": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "segfault": "SIGSEGV",
    "exit text": "SystemExit: words of farewell",
    "long": "Refused: in Metric.compute of slot 2, xxx",
    "memory": "MemoryError",
    "unprintable": "Unprintable: <its text is not known: RuntimeError in __str__>",
    "unpicklable": "Unpicklable: in Optimizer.step",
    "chained": "Refused: in training_step",
    "group": "ExceptionGroup: in backward of slot 3 (2 sub-exceptions)",
}


@dataclass(frozen=True)
class Run:
    """A run of ``jobs/raising.py``."""

    job: JobResult
    seen: dict[int, list[dict[str, Any]]]

    def of(self, slot: int, incarnation: int = 0) -> list[dict[str, Any]]:
        return [record for record in self.seen.get(slot, []) if record["incarnation"] == incarnation]

    def names(self, slot: int, incarnation: int = 0) -> list[str]:
        return [record["seen"] for record in self.of(slot, incarnation) if record["seen"] != "worker"]

    @property
    def told(self) -> list[str]:
        return [line for line in self.job.stderr.splitlines() if line.startswith("[lightning-ft]")]

    def count(self, text: str) -> int:
        return len(re.findall(rf"^(?:\[slot \d\] )?{re.escape(text)}", self.job.stderr, re.M))


def run(directory: Path, timeout: float = 180.0, **options: Any) -> Run:
    directory.mkdir(exist_ok=True)
    devices = options.get("devices", 3)
    job = run_job(JOB, [json.dumps(options)], num_slots=devices, directory=directory, timeout=timeout)
    assert not list(directory.rglob("*.writing"))
    seen = {
        slot: [json.loads(line) for line in path.read_text().splitlines()]
        for slot in range(devices)
        if (path := directory / f"seen_{slot}.jsonl").exists()
    }
    assert not [record for records in seen.values() for record in records if is_alive(record["pid"])]
    return Run(job, seen)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_went_on(run: Run, places: dict[int, list[str]]) -> None:
    run.job.check()
    assert all("end" in run.names(slot, len(places.get(slot, []))) for slot in run.seen)
    assert_recovered(run.job.events)
    assert_steps_contiguous(run.job.events)
    assert_every_ticket_once(run.job.events)


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("hooks")
    return run(directory, 500.0, devices=4, places=PLACES, ft={"min_replicas": 4, "max_restarts": 20})


def test_a_training_outlives_exceptions_in_any_hook_of_single_ranks(hooks: Run) -> None:
    assert_went_on(hooks, PLACES)


@pytest.mark.parametrize(
    ("slot", "incarnation", "place"),
    [(slot, n, place) for slot, places in PLACES.items() for n, place in enumerate(places)],
)
def test_an_exception_in_a_hook_is_seen_once_and_handled_as_ever(
    slot: int, incarnation: int, place: str, hooks: Run
) -> None:
    assert hooks.names(slot, incarnation) == ["fault", *RAISED]
    assert hooks.of(slot, incarnation)[0]["place"] == place
    assert hooks.count(f"Refused: in {place} of slot {slot}") == 1


def test_a_training_outlives_every_way_in_which_a_rank_can_end(tmp_path: Path) -> None:
    job = run(tmp_path, 500.0, devices=4, places=WAYS, ft={"min_replicas": 4, "max_restarts": 20})
    assert_went_on(job, WAYS)
    for slot, ways in WAYS.items():
        for incarnation, way in enumerate(ways):
            how = way.partition("@")[0]
            names = job.names(slot, incarnation)
            assert names == (["fault"] if how in ("_exit", "abort", "segfault") else ["fault", *RAISED]), way
            (told,) = [line for line in job.told if f"died ({HOW[how]}" in line]
            assert len(told) < 400
    assert len(job.job.stderr) < 400_000


def test_what_one_rank_raises_before_the_first_step_ends_the_job(tmp_path: Path) -> None:
    for place in ("configure_model", "DataModule.val_dataloader", "Callback.on_sanity_check_end"):
        job = run(tmp_path / place, places={"2": [place]}, at_step=0)
        assert job.job.returncode == 1
        assert job.names(2) == ["fault", *RAISED]
        assert job.count(f"Refused: in {place} of slot 2") == 1
        assert job.count("Traceback") == 1
        assert job.told == ["[lightning-ft] Slot 2 raised Refused before the first step."]


@pytest.mark.parametrize(
    ("place", "workers"), [("training_step", 2), ("Callback.on_train_batch_end", 0), ("on_validation_epoch_end", 0)]
)
def test_what_all_ranks_raise_ends_the_job_with_checkpoints_of_one_step(place: str, workers: int, tmp_path: Path) -> None:
    places = {str(slot): [place] for slot in range(3)}
    job = run(tmp_path, places=places, at_step=3, workers=workers, checkpoints=True)
    assert job.job.returncode == 1
    assert all(job.names(slot) == ["fault", *RAISED] for slot in range(3))
    assert job.count("Traceback") == 3, "their texts differ"
    assert "so did every other member, without a step in between" in job.told[-1]
    checkpoint = torch.load(tmp_path / "checkpoints" / "on_exception.ckpt", weights_only=False)
    assert checkpoint["global_step"] == max(record["step"] for record in job.of(0) if "step" in record)
    kept = list((tmp_path / "kept").glob("*.ckpt"))
    # Whoever raises when rank 0 is gone already is rank 0 then, and writes, too.
    assert {path.stem.removesuffix("-v1") for path in kept} == {"last", f"epoch=0-step={checkpoint['global_step']}"}
    assert {torch.load(path, weights_only=False)["global_step"] for path in kept} == {checkpoint["global_step"]}


def test_only_rank_0_writes_a_checkpoint_when_it_raises_alone(tmp_path: Path) -> None:
    places = {1: ["on_train_batch_start"], 0: ["on_train_batch_end"]}
    job = run(tmp_path, places=places, at_step=3, checkpoints=True, ft={"min_replicas": 3})
    assert_went_on(job, places)
    (written,) = (tmp_path / "kept").glob("epoch=*.ckpt")
    step = job.of(0)[1]["step"]
    assert written.name == f"epoch=0-step={step}.ckpt"
    assert torch.load(tmp_path / "kept" / "last.ckpt", weights_only=False)["global_step"] == step
    assert job.of(1)[1]["step"] <= step


def test_a_state_that_cannot_be_collected_costs_only_the_rank_that_comes_back(tmp_path: Path) -> None:
    job = run(tmp_path, places={"0": ["Callback.state_dict"], "1": ["training_step"]}, ft={"min_replicas": 3})
    assert_went_on(job, {0: [], 1: ["training_step", "joining"]})
    assert job.names(0) == ["fault", "Logger.finalize", "end", "atexit"]
    assert job.names(1, 1) == RAISED
    error = "Rank 0 could not collect the state for a rank that joins: Refused: in Callback.state_dict of slot 0"
    assert job.count(f"lightning_ft.errors.StateUnavailableError: {error}") == 1
    assert len([line for line in job.told if f"died (StateUnavailableError: {error})" in line]) == 1


def test_a_state_that_can_never_be_sent_ends_in_a_job_of_those_that_are_left(tmp_path: Path) -> None:
    places = {"0": ["object@Callback.state_dict"], "1": ["training_step"]}
    job = run(tmp_path, places=places, ft={"min_replicas": 3, "max_restarts": 2})
    assert job.job.returncode == 1
    assert job.names(0) == ["fault", *RAISED]
    assert job.names(1, 1) == job.names(1, 2) == RAISED
    assert job.count("lightning_ft.errors.StateUnavailableError: Rank 0 could not collect the state") == 1
    assert "checkpoint']['callbacks']['Watched']['some']` cannot be sent to another rank" in job.job.stderr
    assert "it stays out after 2 respawns" in job.told[-2]
    assert job.told[-1].endswith("2 alive, 3 needed (`min_replicas`), and the others may not start again.")


def test_a_logger_that_fails_in_one_rank_0_is_taken_over_by_the_next(tmp_path: Path) -> None:
    places = {0: ["Logger.log_metrics"], 1: ["Logger.log_dir"]}
    job = run(tmp_path, places=places, ft={"min_replicas": 3})
    assert_went_on(job, places)
    for slot, (place,) in places.items():
        assert job.names(slot) == ["fault", *RAISED]
        assert job.count(f"Refused: in {place} of slot {slot}") == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_ends_the_job_with_its_traceback(workers: int, tmp_path: Path) -> None:
    job = run(tmp_path, index=7, workers=workers, ft={"max_restarts": 1})
    assert job.job.returncode == 1
    assert job.count("Refused: sample 7 is broken" if workers == 0 else "Refused: Caught Refused in DataLoader worker") == 1
    assert "Refused" in job.told[-1]


def test_a_training_outlives_samplers_and_workers_that_fail_as_they_begin(tmp_path: Path) -> None:
    places = {0: ["Sampler.__iter__"], 1: ["worker_init"]}  # rank 0 draws the order for all
    job = run(tmp_path, places=places, workers=1, sampler=True, ft={"min_replicas": 3})
    assert_went_on(job, places)
    assert job.names(0) == job.names(1) == ["fault", *RAISED]
    assert job.count("Refused: in Sampler.__iter__ of slot 0") == 1
    assert job.count("Refused: Caught Refused in DataLoader worker") == 1


@pytest.mark.parametrize(
    "places",
    [
        {"1": ["test_step"], "2": ["Callback.on_test_end"], "3": ["predict_step"]},
        {"1": ["on_test_epoch_end"], "2": ["DataModule.predict_dataloader"], "3": ["Callback.on_predict_epoch_end"]},
    ],
    ids=["steps", "epochs"],
)
def test_others_go_on_with_a_test_or_predictions_in_which_one_rank_raises(
    places: dict[str, list[str]], tmp_path: Path
) -> None:
    job = run(tmp_path, devices=4, places=places, calls=["fit", "test", "predict"], max_epochs=1)
    job.job.check()
    assert [name for name in job.names(0) if name not in RAISED] == ["end"]
    for slot, (place,) in places.items():
        assert job.names(int(slot))[-5:] == ["fault", *RAISED]
        assert job.count(f"Refused: in {place} of slot {slot}") == 1


def test_what_all_ranks_raise_in_a_test_ends_the_job(tmp_path: Path) -> None:
    places = {str(slot): ["Callback.on_test_batch_start"] for slot in range(3)}
    job = run(tmp_path, places=places, calls=["fit", "test"], max_epochs=1)
    assert job.job.returncode == 1
    assert all(job.names(slot)[-5:] == ["fault", *RAISED] for slot in range(3))
    assert "so did every other member, without a step in between" in job.told[-1]


@pytest.mark.parametrize("place", ["training_step", "Callback.on_train_batch_end"])
def test_exit_codes_of_all_ranks_are_the_job_s(place: str, tmp_path: Path) -> None:
    places = {str(slot): [f"exit 3@{place}"] for slot in range(3)}
    job = run(tmp_path, places=places, at_step=2)
    assert job.job.returncode == 3
    assert all(job.names(slot) == ["fault", *RAISED] for slot in range(3))
    assert job.count("Traceback") == 0
