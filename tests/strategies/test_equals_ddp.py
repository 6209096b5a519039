"""Without faults FTStrategy computes what Lightning's own ``ddp`` computes, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft.testing import assert_every_ticket_once, assert_metrics_equal, assert_weights_equal

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"accumulate": 3, "clip": 0.1, "loggers": ["csv", "tensorboard"]},
    "bf16 and workers": {"precision": "bf16-mixed", "workers": 2},
    "batch norm and dropout": {"batch_norm": True, "dropout": 0.3, "val_check_interval": 0.5},
}


def checkpoint_contents(directory: Path) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for path in directory.rglob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        # What only ours has: where the events are, and the position in the data.
        checkpoint.pop("lightning_ft", None)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("elastic_loaders", None)
        contents[str(path.relative_to(directory))] = checkpoint
    return contents


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_training_without_faults_equals_ddp(
    options: dict[str, Any], train: Callable[..., Any], train_with_ddp: Callable[..., Any]
) -> None:
    ours = train(devices=2, **options)
    theirs = train_with_ddp(devices=2, **options)
    ours.job.check()
    theirs.job.check()

    ours.assert_ranks_agree()
    assert_every_ticket_once(ours.events)
    assert [event["reason"] for event in ours.of("generation") if event["slot"] is None][:1] == ["start"]
    for rank in range(2):
        assert_weights_equal(ours.results[rank]["fingerprint"], theirs.results[rank]["fingerprint"])
        assert ours.results[rank]["callback_metrics"] == theirs.results[rank]["callback_metrics"]
        assert ours.results[rank]["random"] == theirs.results[rank]["random"]
    metrics = Path("csv", "version_0", "metrics.csv")
    assert_metrics_equal(ours.directory / metrics, theirs.directory / metrics)

    our_checkpoints, their_checkpoints = map(checkpoint_contents, (ours.directory, theirs.directory))
    assert our_checkpoints.keys() == their_checkpoints.keys()
    for name, checkpoint in our_checkpoints.items():
        assert checkpoint.keys() == their_checkpoints[name].keys()
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert_weights_equal({part: checkpoint[part]}, {part: their_checkpoints[name][part]})
