"""What the multi-process tests share: how the sample training is run, and what must hold after each of its runs."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.events.log import Events
from lightning_ft.testing import (
    FaultPlan,
    JobResult,
    assert_every_ticket_once,
    assert_no_violations,
    assert_recovered,
    assert_steps_contiguous,
    assert_used_up,
    assert_weights_equal,
    run_job,
    run_without_supervisor,
)

# The background of a shell has SIGINT ignored, and so would have all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Values are compared bit for bit, and sums depend on how many threads share them; Lightning's `ddp` sets it if nobody does.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

JOBS = Path(__file__).parent / "strategies" / "jobs"
OBJECT_STORE = Path(__file__).parent / "object_store.py"


class ObjectStore:
    """A process that speaks S3."""

    def __init__(self) -> None:
        command = [sys.executable, str(OBJECT_STORE)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http"), "it did not start"

    def close(self) -> None:
        with self.process:  # closes its input
            self.process.kill()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """The store that addresses with ``s3://`` lead to, in this process and in those that it starts."""
    import fsspec

    store = ObjectStore()
    known = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": store.address, **known}.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # one a thread, with the credentials of then
        yield store
    store.close()


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    """The address of a place of its own in a store."""
    import fsspec

    name = f"bucket-{secrets.token_hex(6)}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


@dataclass(frozen=True)
class Training:
    """A run of ``jobs/train.py``."""

    job: JobResult
    results: dict[int, dict[str, Any]]

    @property
    def directory(self) -> Path:
        return self.job.directory

    @property
    def events(self) -> Events:
        return self.job.events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def assert_went_on(self, plan: FaultPlan, num_samples: int = 96, max_epochs: int = 2) -> None:
        """Everything that is promised after deaths, whatever died when."""
        self.job.check()
        assert_used_up(plan, self.events)
        assert_recovered(self.events)
        assert_steps_contiguous(self.events)
        assert_every_ticket_once(self.events)
        assert_no_violations(self.events)
        self.assert_every_sample_once(num_samples, max_epochs)
        self.assert_ranks_agree()
        self.assert_logs_are_in_one_version()

    def assert_ranks_agree(self) -> None:
        assert self.results
        if len(self.results) > 1:
            assert_weights_equal(*(result["fingerprint"] for result in self.results.values()))
        for name in ("random", "callback_metrics", "global_step", "epoch", "best_model_path"):
            values = {slot: result[name] for slot, result in self.results.items()}
            assert len({json.dumps(value, sort_keys=True) for value in values.values()}) == 1, f"{name}: {values}"

    def assert_logs_are_in_one_version(self) -> None:
        for name in ("csv", "board"):
            versions = [path.name for path in self.directory.glob(f"{name}/*")]
            assert versions in ([], ["version_0"])

    def assert_every_sample_once(self, num_samples: int, max_epochs: int) -> None:
        for epoch, counts in enumerate(self.trained_samples(max_epochs)):
            assert counts == Counter(range(num_samples)), f"epoch {epoch} did not train every sample once"

    def trained_samples(self, max_epochs: int) -> list[Counter[int]]:
        """How often each epoch trained each sample, in committed steps."""
        samples: dict[tuple[int, int], list[int]] = {}
        for path in self.directory.glob("samples_*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                known = samples.setdefault((record["epoch"], record["ticket"]), record["samples"])
                assert known == record["samples"], "two ranks see different samples in one ticket"
        steps = {event["step"]: event for event in self.of("step")}
        steps |= {-event["batch"]: event for event in self.of("accumulated")}
        trained: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(max_epochs)}
        for event in steps.values():
            for tickets in event["tickets"].values():
                for ticket in tickets:
                    trained[event["epoch"]].update(samples[event["epoch"], ticket])
        return list(trained.values())


def _results(directory: Path) -> dict[int, dict[str, Any]]:
    paths = sorted(directory.glob("result_*.json"))
    return {int(path.stem.removeprefix("result_")): json.loads(path.read_text()) for path in paths}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Training]:
    """Run ``jobs/train.py`` under FTStrategy, in a directory of its own."""

    def run(plan: FaultPlan | None = None, *, name: str = "ft", timeout: float = 180.0, **options: Any) -> Training:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        options = {"strategy": "FTStrategy", "devices": 3, **options}
        job = run_job(
            JOBS / "train.py",
            [json.dumps(options)],
            num_slots=options["devices"],
            faults=plan,
            directory=directory,
            timeout=timeout,
        )
        return Training(job, _results(directory))

    return run


@pytest.fixture
def train_on_streams(tmp_path: Path) -> Callable[..., Training]:
    """Run ``jobs/streams.py``, under FTStrategy or another strategy, in a directory of its own."""

    def run(plan: FaultPlan | None = None, *, name: str = "", timeout: float = 180.0, **options: Any) -> Training:
        options = {"strategy": "FTStrategy", "devices": 3, **options}
        directory = tmp_path / (name or options["strategy"])
        directory.mkdir()
        where: dict[str, Any] = {"directory": directory, "timeout": timeout}
        script, arguments = JOBS / "streams.py", [json.dumps(options)]
        if options["strategy"] == "ddp":
            job = run_without_supervisor(script, arguments, num_ranks=options["devices"], **where)
        else:
            job = run_job(script, arguments, num_slots=options["devices"], faults=plan, **where)
        return Training(job, _results(directory))

    return run


@pytest.fixture
def train_with_ddp(tmp_path: Path) -> Callable[..., Training]:
    """Run ``jobs/train.py`` under Lightning's own ``ddp``, in a directory of its own."""

    def run(*, name: str = "ddp", timeout: float = 180.0, **options: Any) -> Training:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        options = {"strategy": "ddp", "devices": 2, **options}
        job = run_without_supervisor(
            JOBS / "train.py",
            [json.dumps(options)],
            num_ranks=options["devices"],
            directory=directory,
            timeout=timeout,
        )
        return Training(job, _results(directory))

    return run
