"""What TensorDump writes on one device, of modules that know nothing of it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ft import cli
from lightning_ft.callbacks import TensorDump
from lightning_ft.dump import dump
from lightning_ft.dump.diff import assert_dumps_equal, compare
from lightning_ft.dump.reader import Key, find_attempts, read_records


class Block(nn.Module):
    """Gives back something nested, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.act(self.linear(x))
        return {"hidden": hidden, "rest": (hidden * scale, None)}


class Model(LightningModule):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.recompute = recompute

    def _run(self, x: Tensor) -> Tensor:
        scale = torch.full((1,), 2.0)
        if self.recompute:
            out = checkpoint(lambda x: self.block(x, scale=scale), x, use_reentrant=False)
        else:
            out = self.block(x, scale=scale)
        dump("scaled", out["rest"][0])
        return self.head(self.norm(out["rest"][0])) + self.head(out["hidden"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._run(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self._run(batch[0]).mean(), "other": 1}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._run(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Perturbed(Model):
    """The same, but for one bias from step 2 on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            with torch.no_grad():
                self.head.bias.add_(1e-3)
        return super().training_step(batch, batch_idx)


def fit(callback: TensorDump, directory: Path, make: Callable[[], LightningModule] = Model, **options: Any) -> Trainer:
    seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(32, 4))
    trainer = Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "devices": 1, **options},
        callbacks=[callback],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make(), DataLoader(data, batch_size=8), DataLoader(TensorDataset(data.tensors[0][:8]), batch_size=4))
    return trainer


def names(records: Any, **where: Any) -> set[str]:
    return {key.name for key in records if all(getattr(key, name) == value for name, value in where.items())}


def load(records: Any, where: str, step: int, name: str, micro_batch: int = 0, call: int = 0) -> Tensor:
    (tensor,) = records[Key(where, step, 0, micro_batch, name, call)].load()
    return tensor


def test_everything_of_a_training_is_there_by_name(tmp_path: Path) -> None:
    trainer = fit(TensorDump(tmp_path / "dumps"), tmp_path, accumulate_grad_batches=2)
    records = read_records(tmp_path / "dumps" / "model")
    first = names(records, where="train/rollout_0", step=0, micro_batch=0)
    assert {
        "batch:[0]",
        "loss:",
        "value:scaled",
        "input:block[0]",
        "input:block[1][scale]",
        "input:block.linear",
        "output:block.linear",
        "output:block[hidden]",
        "output:block[rest][0]",
        "grad_output:block[rest][0]",
        "grad_output:head",
        "grad_input:head",
        "parameter:head.weight",
        "buffer:norm.running_mean",
    } <= first
    assert {"parameter_grad:head.weight"} <= names(records, where="train/rollout_0", step=0, micro_batch=1)
    optimizer = names(records, where="train/rollout_1", step=2, micro_batch=1)
    assert {"optimizer:head.weight.exp_avg", "optimizer:block.linear.bias.step", "parameter_grad:norm.bias"} <= optimizer
    assert not [name for name in names(records, where="train/rollout_1", step=3) if name.startswith(("param", "optim"))]
    assert names(records, where="validate/rollout_0") >= {"batch:[0]", "loss:", "output:head", "parameter:head.bias"}
    assert trainer.global_step == 4
    # What they are, and not only that they are there:
    head = [load(records, "train/rollout_0", 0, f"parameter:head.{name}") for name in ("weight", "bias")]
    for call in (0, 1):
        inputs, output = (load(records, "train/rollout_0", 0, f"{kind}:head", call=call) for kind in ("input", "output"))
        torch.testing.assert_close(output, torch.nn.functional.linear(inputs, *head))
    x = load(records, "train/rollout_0", 0, "input:block.linear")
    assert torch.equal(x, load(records, "train/rollout_0", 0, "batch:[0]"))
    grads = [
        load(records, "train/rollout_0", 0, "grad_output:head", micro_batch=n, call=call).sum()
        for n in (0, 1)
        for call in (0, 1)
    ]
    torch.testing.assert_close(
        torch.stack(grads).sum(), load(records, "train/rollout_0", 0, "parameter_grad:head.bias", 1)[0]
    )


def test_same_run_twice_is_equal_and_the_training_is_what_it_is_without(tmp_path: Path) -> None:
    weights = []
    for number, name in enumerate(("a", "b", "c")):
        callback = TensorDump(tmp_path / name, config={"enable": number < 2})
        trainer = fit(callback, tmp_path)
        weights.append([*trainer.model.state_dict().values()])
    assert all(torch.equal(*pair) for other in weights[1:] for pair in zip(weights[0], other, strict=True))
    assert_dumps_equal(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "c").exists()
    for found in find_attempts(tmp_path / "a"):
        found.verify()


def test_first_divergence_is_the_layer_and_step_where_it_began(tmp_path: Path) -> None:
    fit(TensorDump(tmp_path / "a"), tmp_path)
    fit(TensorDump(tmp_path / "b"), tmp_path, Perturbed)
    comparison = compare(tmp_path / "a", tmp_path / "b")
    first = comparison.differences[0]
    assert (first.key.name, first.key.step) == ("output:head", 2)
    assert first.max_abs == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(AssertionError, match=r"First divergence: output:head \(model/train/rollout_0, step 2, batch 0\)"):
        assert_dumps_equal(tmp_path / "a", tmp_path / "b")
    assert_dumps_equal(tmp_path / "a" / "model" / "train" / "rollout_0", tmp_path / "b/model/train/rollout_0", atol=1.0)


def test_recomputed_activations_are_dumped_once_with_their_gradients(tmp_path: Path) -> None:
    fit(TensorDump(tmp_path / "a"), tmp_path)
    fit(TensorDump(tmp_path / "b"), tmp_path, lambda: Model(recompute=True))
    only_b = [key.name for key in compare(tmp_path / "a", tmp_path / "b").extra]
    assert only_b == []
    assert_dumps_equal(tmp_path / "a", tmp_path / "b")


def test_phases_and_rollouts_are_selected_and_nothing_is_hooked_otherwise(tmp_path: Path) -> None:
    hooked = []

    class Watched(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hooked.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules()))
            return super().training_step(batch, batch_idx)

    config = {"filter": "output:*@Linear", "rollouts": [1], "validate": {"rollouts": None, "dtype": "bfloat16"}}
    fit(TensorDump(tmp_path, config=config, rollout_id=3), tmp_path, Watched)
    records = read_records(tmp_path / "model")
    assert {key.where for key in records} == {"train/rollout_1", "validate/rollout_1", "validate/rollout_2"}
    assert {key.step for key in records if key.where == "train/rollout_1"} == {3, 4, 5}
    assert names(records) == {"output:block.linear", "output:head"}
    assert hooked == [0, 0, 0, 2, 2, 2, 0, 0]
    validated = load(records, "validate/rollout_1", 4, "output:head")
    assert validated.dtype == torch.bfloat16


def test_rollouts_go_by_what_the_module_says(tmp_path: Path) -> None:
    class Rolling(Model):
        @property
        def rollout_id(self) -> int:
            return 10 + self.global_step // 2

    trainer = fit(TensorDump(tmp_path, role="actor", config={"filter": "loss:"}), tmp_path, Rolling, max_steps=4)
    trainer.predict(trainer.model, DataLoader(TensorDataset(torch.randn(4, 4))))
    assert {key.where for key in read_records(tmp_path / "actor")} == {
        "train/rollout_10",
        "train/rollout_11",
        "validate/rollout_12",
    }


def test_a_new_training_replaces_dumps_of_earlier_ones_but_not_of_other_roles_or_phases(tmp_path: Path) -> None:
    config = {"filter": ["loss:", "prediction:"]}
    callback = TensorDump(tmp_path, config=config)
    trainer = fit(callback, tmp_path, max_epochs=3)
    trainer.predict(trainer.model, DataLoader(TensorDataset(torch.randn(4, 4))))
    fit(TensorDump(tmp_path, role="critic", config=config), tmp_path)
    attempts = find_attempts(tmp_path)
    assert len(attempts) == 3 + 3 + 1 + 2 + 2
    fit(TensorDump(tmp_path, config=config), tmp_path)
    again = find_attempts(tmp_path)
    assert len(again) == len(attempts) + 4, "the same run goes on: nothing of it is removed"
    from lightning_ft.callbacks import tensor_dump

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_dump, "_PROCESS", "another")
        fit(TensorDump(tmp_path, config=config), tmp_path)
    left = [(f.attempt.role, f.attempt.phase, f.attempt.rollout, f.number) for f in find_attempts(tmp_path)]
    assert [where for where in left if where[:2] == ("model", "train")] == [
        ("model", "train", 0, 1),
        ("model", "train", 1, 1),
    ]
    assert {role for role, phase, _, _ in left if phase == "predict"} == {"model"}
    assert len([where for where in left if where[0] == "critic"]) == 4


def test_an_exception_leaves_what_is_not_whole(tmp_path: Path) -> None:
    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 5:
                raise RuntimeError("enough")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="enough"):
        fit(TensorDump(tmp_path), tmp_path, Failing)
    states = [(f.attempt.phase, f.attempt.rollout, f.is_complete) for f in find_attempts(tmp_path)]
    assert states == [("train", 0, True), ("train", 1, False), ("validate", 0, True)]
    assert {key.where for key in read_records(tmp_path / "model")} == {"train/rollout_0", "validate/rollout_0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "a/b"}, "`TensorDump(role='a/b')` is not valid: expected letters, digits"),
        ({"rollout_id": 0}, "`TensorDump(rollout_id=0)` is not valid: expected an integer, 1 or more."),
        ({"config": {"filtre": "*"}}, "there is no `filtre`. Did you mean 'filter'? Expected enable, filter"),
        ({"config": {"valid": {}}}, "there is no `valid`. Did you mean 'validate'? Expected"),
        ({"config": {"test": {"rollout": [1]}}}, "there is no `test.rollout`. Did you mean 'rollouts'? Expected"),
        ({"config": {"validate": False}}, "`TensorDump(config={'validate': False})` is not valid: expected a mapping"),
        (
            {"config": {"filter": ["loss"]}},
            "`TensorDump(filter=['loss'])` is not valid: expected KIND:PATH. Did you mean 'loss:*'",
        ),
        (
            {"config": {"filter": ["foo:*"]}},
            "`TensorDump(filter=['foo:*'])` is not valid: expected KIND:PATH. Kinds are batch",
        ),
        ({"config": {"filter": ["*", "!outputs*"]}}, "`TensorDump(filter=['!outputs*'])` is not valid"),
        ({"config": {"filter": []}}, "`TensorDump(filter=[])` is not valid: expected a pattern of what is dumped"),
        ({"config": {"filter": ["!loss:*"]}}, "`TensorDump(filter=['!loss:*'])` is not valid: expected a pattern of what"),
        ({"config": {"dtype": torch.int8}}, "`TensorDump(dtype='torch.int8')` is not valid"),
        ({"config": {"dtype": object()}}, "`TensorDump(config=...)` is not valid: "),
        ({"config": 3}, "`TensorDump(config=3)` is not valid: expected a mapping of options, or None."),
        ({"dirpath": ""}, "`TensorDump('')` is not valid: expected the path of a directory"),
        ({"dirpath": None}, "`TensorDump(None)` is not valid: expected the path of a directory"),
        ({"dirpath": "s3://bucket/x"}, "`TensorDump('s3://bucket/x')` is not valid: expected the path of a directory"),
        ({"config": {"validate": {"every_n_rollouts": 0}}}, "`TensorDump(every_n_rollouts=0)` is not valid"),
        ({"config": {"dtype": "int8"}}, "`TensorDump(dtype='int8')` is not valid: expected the name of a floating-point"),
        ({"config": {"max_bytes": "many"}}, "could not be converted to Integer"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorDump(**{"dirpath": tmp_path, **arguments})


def test_a_pattern_that_matches_nothing_of_the_module_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patterns = [
        "output:*@Linaer",
        "*@ReLU",
        "parameter:haed.*",
        "!input:blok",
        "buffer:*",
        "value:none",
        "loss:",
        "*:head.bias",
    ]
    fit(TensorDump(tmp_path, config={"filter": patterns, "dtype": torch.float16, "test": {"enable": False}}), tmp_path)
    told = [record.getMessage() for record in caplog.records if "matches nothing" in record.getMessage()]
    assert told == [
        f"`TensorDump(filter=['{pattern}'])` matches nothing in Model."
        for pattern in ("output:*@Linaer", "parameter:haed.*", "!input:blok")
    ]


class LastBatchIsOfAnother(SingleDeviceStrategy):
    """Says what a strategy does whose loader had no batch for this rank in the first and the last step of an epoch."""

    @property
    def has_own_batch(self) -> bool:
        steps = self.lightning_module.trainer.global_step
        return steps % 4 not in (0, 3)


def test_a_step_without_a_batch_of_this_rank_is_told_and_the_validation_after_it_is_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"filter": ["output:head", "loss:"]}
    strategy = LastBatchIsOfAnother("cpu")
    fit(TensorDump(tmp_path, config=config), tmp_path, strategy=strategy)
    records = read_records(tmp_path)
    assert names(records, where="model/train/rollout_1", step=6) == {"output:head", "loss:"}
    for step in (4, 7):
        assert names(records, where="model/train/rollout_1", step=step) == {"no_batch:"}
    assert names(records, where="model/validate/rollout_1") == {"output:head", "loss:"}
    with pytest.raises(SystemExit):
        cli.main(["dump", "ls", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if " train " in line]
    assert [line.split()[5] for line in lines] == ["0-3", "4-7"]
    assert lines[1].endswith("no batch of this replica in step 4, 7")


def test_two_of_one_role_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[TensorDump(tmp_path), TensorDump(tmp_path)], logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="Give each its own `role`"):
        trainer.predict(Model(), DataLoader(TensorDataset(torch.randn(4, 4))))


def test_wrong_rollout_id_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`TensorDump\(rollout_id=\.\.\.\)` is -1: expected an integer, 0 or more."):
        fit(TensorDump(tmp_path, rollout_id=lambda trainer: -1), tmp_path)
