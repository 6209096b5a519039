"""The example that builds strategy, options and callbacks from YAML."""

from pathlib import Path

import yaml

from lightning_ft.testing import assert_every_ticket_once, assert_recovered, run_job

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_command_line_trains_from_yaml_and_survives_a_kill(tmp_path):
    config = yaml.safe_load((EXAMPLES / "cli.yaml").read_text())
    fault = {"kind": "kill", "slot": 0, "point": "gradients_ready", "step": 4}
    config["trainer"]["callbacks"].append(
        {
            "class_path": "lightning_ft.testing.FaultPlan",
            "init_args": {"faults": [fault], "directory": str(tmp_path / "plan")},
        }
    )
    config["data"]["num_chunks"] = 480
    (tmp_path / "cli.yaml").write_text(yaml.safe_dump(config))
    arguments = ["fit", "--config", "cli.yaml"]
    result = run_job(EXAMPLES / "cli.py", arguments, num_slots=3, directory=tmp_path).check()
    assert_recovered(result.events)
    assert_every_ticket_once(result.events)
    assert [path.name for path in (tmp_path / "outputs" / "cli").iterdir()] == ["version_0"]


def test_strategy_is_known_by_its_name_and_by_its_path(tmp_path):
    for name in ("ft", "lightning_ft.FTStrategy"):
        arguments = ["fit", "--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={name}"]
        arguments += [
            "--trainer.max_steps=3",
            "--trainer.limit_val_batches=0",
            "--data.num_chunks=60",
            "--trainer.logger=false",
        ]
        result = run_job(EXAMPLES / "cli.py", arguments, num_slots=2, directory=tmp_path).check()
        assert {event["step"] for event in result.events if event["event"] == "step"} == {1, 2, 3}
