"""Runs rows of the table one after another; each rank leaves a record of each."""

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from recording import Recorder, digest, digest_elsewhere, hooks_recorded, plain
from row import Row, Run
from rows import TABLE

from lightning_ft import FTStrategy
from lightning_ft.testing import FaultPlan, end_process, fingerprint

warnings.filterwarnings("ignore")

STRATEGIES: dict[str, dict[str, Any]] = {"ft": {}, "sharded": {"shard_size": 2}}


def run_row(row: Row, strategy: str, devices: int, ft: dict[str, Any], who: str) -> dict[str, Any]:
    record: dict[str, Any] = {}

    def make_trainer(**more: Any) -> Trainer:
        options: dict[str, Any] = {"logger": [CSVLogger(".", name="csv")], **row.trainer_options(), **more}
        given = options.pop("callbacks", None)
        callbacks = [Recorder(record, Path(f"samples_{who}.jsonl")), *(row.callbacks() if given is None else given)]
        if faults.faults:
            callbacks.insert(0, faults)
        defaults = {
            "accelerator": "cpu",
            "devices": devices,
            "strategy": row.ddp if strategy == "ddp" else FTStrategy(**{**STRATEGIES[strategy], **ft, **row.ft}),
            "default_root_dir": ".",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        if not options.get("barebones"):
            defaults["log_every_n_steps"] = 1
        if not {"max_steps", "max_epochs", "max_time"} & options.keys():
            defaults["max_epochs"] = 2
        if options["logger"] is None:
            del options["logger"]
        if not options.pop("recorded", True):
            callbacks = callbacks[:0]
        return Trainer(**{**defaults, **options}, **({"callbacks": callbacks} if callbacks else {}))

    faults = FaultPlan.from_environ()
    seed_everything(7, verbose=False)
    with hooks_recorded(record):
        run = Run(row, make_trainer)
        record["returned"] = plain(row.calls(run))
    trainer = run.trainer
    record |= {
        "rank": trainer.global_rank,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "state": str(trainer.state.status),
        "should_stop": trainer.should_stop,
        "callback_metrics": plain(trainer.callback_metrics),
        "logged_metrics": plain(trainer.logged_metrics),
        "weights": {} if trainer.lightning_module is None else fingerprint(trainer),
        "callbacks": {
            type(callback).__name__: digest_elsewhere(callback.state_dict(), Path.cwd())
            for callback in trainer.callbacks
            if not isinstance(callback, Timer)  # it keeps seconds
        },
        "random": [digest(torch.get_rng_state()), digest(np.random.get_state()[1].tolist()), digest(random.getstate())],
    }
    return record


def main(names: list[str], strategy: str, devices: int, ft: dict[str, Any]) -> None:
    rows = {row.name: row for row in TABLE}
    slot = os.environ.get("LIGHTNING_FT_SLOT") or os.environ["RANK"]
    who = f"{slot}_{os.environ.get('LIGHTNING_FT_INCARNATION', 0)}"
    top = Path.cwd()
    for name in names:
        directory = top / name
        directory.mkdir(exist_ok=True)
        os.chdir(directory)
        Path(f"started_{who}").touch()
        record = run_row(rows[name], strategy, devices, ft, who)
        Path(f"record_{who}.json").write_text(json.dumps(record))
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
    end_process()
