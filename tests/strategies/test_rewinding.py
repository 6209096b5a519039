from typing import Any

from lightning.pytorch import Trainer

from lightning_ft.strategies.rewinding import run_again


def test_running_again_skips_what_begins_a_training_and_leaves_what_callbacks_put_in_its_place() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1, barebones=True)
    loop: Any = trainer.fit_loop
    calls: list[str] = []

    def own() -> None:
        calls.append("own")

    loop.on_run_start = own
    run_again(trainer, lambda: loop.on_run_start())
    assert (loop.on_run_start, calls) == (own, [])
    del loop.on_run_start
    run_again(trainer, lambda: loop.on_run_start())
    assert "on_run_start" not in vars(loop)
