import json
import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft.callbacks import LoaderPosition, RerunValidation
from lightning_ft.rerun.exit import RerunExit
from lightning_ft.testing import run_job, run_without_supervisor
from tests.callbacks.rerun_fits import OPTIONS, QUIET, Model, always, assert_same_training, fit, nan, once, spike


@pytest.mark.parametrize(("options", "accumulate"), [("plain", 1), ("plain", 3), ("bf16", 3), ("fp16", 1), ("ft", 3)])
def test_after_a_transient_fault_everything_is_as_without_it(options: str, accumulate: int) -> None:
    known = fit(None, accumulate=accumulate, num_batches=66, **OPTIONS[options]())
    assert math.isfinite(known[2].losses[-1])
    for batch_idx, kind in ((1, nan), (64, nan), (65, spike)):
        validation = RerunValidation()
        fault = once(batch_idx, kind)
        ours = fit(validation, fault, accumulate=accumulate, num_batches=66, **OPTIONS[options]())
        rows = [row for row in validation.rows if row["batch_idx"] // accumulate == batch_idx // accumulate]
        assert {(row["rank"], row["verdict"], row["action"]) for row in rows} == {(0, "transient_error", "rerun")}
        assert len(ours[1].calls) == 66 + accumulate * len({row["step"] for row in validation.rows})
        is_inner = batch_idx % accumulate < accumulate - 1
        assert_same_training(ours, known, told_before=batch_idx if is_inner else None)


def test_without_faults_nothing_is_run_twice_and_nothing_is_different() -> None:
    validation = RerunValidation()
    ours, known = fit(validation), fit(None)
    assert_same_training(ours, known)
    assert ours[1].calls == list(range(36))
    assert not validation.rows


class RunsClosure(Model):
    """Looks at the gradients before it steps."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


@pytest.mark.parametrize("options", ["plain", "ft"])
def test_modules_that_run_the_closure_before_the_optimizer_steps_are_validated_too(options: str) -> None:
    def train(validation: RerunValidation | None, fault: Any = None) -> Any:
        seed_everything(3, verbose=False)
        return fit(validation, fault, model=RunsClosure(), **OPTIONS[options]())

    known = train(None)
    validation = RerunValidation()
    assert_same_training(train(validation, once(20, spike)), known)
    assert {row["verdict"] for row in validation.rows} == {"transient_error"}
    validation = RerunValidation(on_correct="skip_batch", without_opinion="assume_correct")
    _, model, _ = train(validation, always(7, nan))
    assert [row["action"] for row in validation.rows] == ["skip_batch"]
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("action", ["skip_batch", "skip_update", "apply"])
def test_a_poisoned_batch_has_the_effect_that_was_asked_for(accumulate: int, action: Any) -> None:
    validation = RerunValidation(on_correct=action, without_opinion="assume_correct")
    trainer, model, _ = fit(validation, always(7, nan), accumulate=accumulate)
    row = validation.rows[0]
    assert (row["verdict"], row["action"], row["batch_idx"] // accumulate) == ("correct_result", action, 7 // accumulate)
    assert trainer.global_step == 36 // accumulate
    assert all(value.isfinite().all() for value in model.state_dict().values()) == (action != "apply")
    assert math.isfinite(trainer.callback_metrics["loss_epoch"]) == (action == "skip_batch")
    assert trainer.callback_metrics["count"] == 36
    if action != "apply":  # after which every step is
        assert [row["name"] for row in validation.rows] == ["loss"]


class Breaks(Callback):
    """The memory of the parameters, after a batch."""

    def __init__(self, batch_idx: int, factor: float) -> None:
        self.batch_idx, self.factor = batch_idx, factor

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            next(pl_module.parameters()).mul_(self.factor)


@pytest.mark.parametrize(("batch_idx", "num_steps"), [(20, 21), (35, 36)])
def test_parameters_that_are_not_finite_end_the_job_before_a_step_is_applied_to_them(batch_idx: int, num_steps: int) -> None:
    validation = RerunValidation(validate_parameters=True, without_opinion="assume_correct")
    with pytest.raises(RerunExit) as ended:
        fit(validation, more=[Breaks(batch_idx, math.nan)])
    assert ended.value.code == 17
    assert validation.machine is not None
    assert [(row["step"], row["name"], row["action"]) for row in validation.rows] == (
        [(num_steps + 1, "parameter norm", "stop")] if batch_idx < 35 else []  # which is told of no step
    )


def test_parameters_that_are_unexpectedly_large_are_told_and_those_that_grow_are_not() -> None:
    validation = RerunValidation(validate_parameters=True, without_opinion="assume_correct")
    fit(validation, more=[Breaks(20, 1e8)])
    row = validation.rows[0]
    assert (row["step"], row["name"]) == (22, "parameter norm is unexpectedly large")
    validation = RerunValidation(validate_parameters=True)
    fit(validation, max_epochs=5)
    assert not validation.rows


def test_a_skipped_batch_leaves_weights_optimizer_buffers_and_metrics_as_they_were() -> None:
    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                self.before = self.state(trainer, pl_module)

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                assert str(self.before) == str(self.state(trainer, pl_module))
                self.checked = True

        @staticmethod
        def state(trainer: Trainer, pl_module: Any) -> Any:
            results = trainer.fit_loop.epoch_loop._results["training_step.loss"]
            optimizer = trainer.optimizers[0].state_dict()["state"]
            return [
                pl_module.state_dict(),
                optimizer,
                pl_module.error._copy_state_dict(),
                results.value,
                results.cumulated_batch_size,
            ]

    watch = Watch()
    validation = RerunValidation(without_opinion="assume_correct")
    seed_everything(3, verbose=False)
    model = Model(always(7, nan))
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
    Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[watch, validation], **QUIET).fit(model, data)
    assert watch.checked
    assert model.calls.count(7) == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_anybody_to_ask_the_job_ends_with_16_and_another_device_tells(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module(Model):
        def configure_callbacks(self) -> Any:
            return [LoaderPosition()]

    options: dict[str, Any] = {"default_root_dir": str(tmp_path), "accumulate": accumulate}
    with pytest.raises(SystemExit) as ended:
        fit(RerunValidation(), always(7, nan), model=Module(), **options)
    assert ended.value.code == 16
    (path,) = tmp_path.glob("rerun-step=*.ckpt")
    assert path.name == f"rerun-step={7 // accumulate}.ckpt"
    for device, fault, on_correct, code, verdict in (
        (platform.node(), always(7, nan), "skip_batch", 16, "undecided"),
        ("elsewhere", always(7, nan), "stop", 17, "correct_result"),
        ("elsewhere", always(7, nan), "skip_batch", 0, "correct_result"),
        ("elsewhere", None, "stop", 0, "persistent_error"),
    ):
        monkeypatch.setattr(platform, "node", lambda device=device: device)
        validation: Any = RerunValidation(on_correct=on_correct)
        told = 0
        try:
            trainer, model, _ = fit(validation, fault, model=Module(), ckpt_path=str(path), **options)
            assert trainer.global_step == 36 // accumulate
            assert all(value.isfinite().all() for value in model.state_dict().values())
        except SystemExit as error:
            told = error.code
        assert (told, {row["verdict"] for row in validation.rows}) == (code, {verdict})


TRANSIENT = "transient_error"
JOB = Path(__file__).parent / "jobs" / "rerun.py"


def run(strategy: str, *scenarios: str, directory: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    arguments = [strategy, *scenarios]
    if strategy in ("ddp", "fsdp2"):
        run_without_supervisor(JOB, arguments, num_ranks=num_ranks, directory=directory).check()
    else:
        job = run_job(JOB, arguments, num_slots=num_ranks, directory=directory).check()
        assert [event for event in job.events if event["event"] == "rejection"]
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result_*.json"))]


def told(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(row["step"], row["batch_idx"], row["rank"], row["verdict"], row["action"]) for row in result["rows"]]


def weights(result: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in result["weights"].items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize("strategy", ["FTStrategy", "sharded", "ddp", "fsdp2"])
def test_ranks_run_a_step_again_together_and_name_the_culprit(strategy: str, tmp_path: Path) -> None:
    results = run(strategy, "no fault", "transient", "poisoned", directory=tmp_path)
    for result in results:
        known, transient, poisoned = result["no fault"], result["transient"], result["poisoned"]
        assert transient["weights"] == known["weights"]
        assert transient["metrics"] == known["metrics"]
        assert (known["steps"], transient["steps"], transient["calls"]) == (9, 9, 27 + 12)
        is_whole = strategy in ("FTStrategy", "ddp")  # else no rank has a gradient of its own
        names = [row["name"] for row in transient["rows"]]
        gradient = ("own " if is_whole else "") + "gradient norm"
        assert names == ["loss", "loss", gradient, "loss is unexpectedly large"]
        assert told(transient) == [
            (1, 2, 1, TRANSIENT, "rerun"),
            (5, 13, 0, TRANSIENT, "rerun"),
            (7, 20, 1 if is_whole else 0, TRANSIENT, "rerun"),
            (9, 25, 1, TRANSIENT, "rerun"),
        ]
        assert poisoned["finite"]
        assert poisoned["steps"] == 9
        assert all(math.isfinite(value) for value in poisoned["metrics"].values())
        assert told(poisoned) == [(3, 7, 1, "correct_result", "skip_batch"), (6, 17, 0, "correct_result", "skip_batch")]
    for scenario in results[0]:
        assert weights(results[0][scenario]) == weights(results[1][scenario])


def test_a_rank_may_die_while_a_step_is_run_again_or_skip_its_batch(tmp_path: Path) -> None:
    results = run("FTStrategy", "killed", directory=tmp_path, num_ranks=3)
    assert [row["verdict"] for row in results[0]["killed"]["rows"]] == ["transient_error"]
    assert len(results) >= 2  # the third may not be back when the others are through
    assert all(weights(result["killed"]) == weights(results[0]["killed"]) for result in results)
    results = run("FTStrategy", "none", directory=tmp_path)
    assert told(results[0]["none"]) == [(9, 8, 0, TRANSIENT, "rerun")]
    assert weights(results[0]["none"]) == weights(results[1]["none"])


def test_the_supervisor_ends_with_the_code_that_asks_for_another_device(tmp_path: Path) -> None:
    job = run_job(JOB, ["sharded", "undecided"], num_slots=2, directory=tmp_path)
    assert job.returncode == 16, job.tail()
    assert "Ends with code 16: resume it on other devices" in job.stderr
    assert list(tmp_path.glob("rerun-step=*.ckpt"))
