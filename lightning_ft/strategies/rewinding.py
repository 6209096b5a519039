"""Takes a running trainer back to an earlier state of its fit, in the same process."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ft.strategies import changing_modules, joining, own_results
from lightning_ft.trainer.known_checkpoints import KnownCheckpoints


def run_again(trainer: Trainer, run: Callable[[], Any]) -> None:
    """Run the fit loop from where it was taken back to, without the hooks that began the training."""
    fit_loop: Any = trainer.fit_loop
    before = vars(fit_loop).get("on_run_start")  # which a callback may have put there, and will take away itself
    fit_loop.on_run_start = lambda: None
    try:
        run()
    finally:
        if before is None:
            del fit_loop.on_run_start
        else:
            fit_loop.on_run_start = before


def wait_for_copies(trainer: Trainer) -> None:
    """Return once callbacks that save in the background have copied what they save: it is about to change."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        getattr(callback, "wait_for_copy", lambda: None)()


def take_back(trainer: Trainer, state: dict[str, Any]) -> None:
    """Collective. Restore what Lightning and the user's callbacks keep; :func:`finish` does the rest at the first batch.

    Args:
        trainer: Its loops were left by an exception.
        state: As :func:`~lightning_ft.strategies.joining.collect_state` returned it.

    """
    files = _known_checkpoints(trainer, state["checkpoint"]["callbacks"])
    trainer.training = True  # and not in the validation in which it may have been
    changing_modules.adopt_groups(trainer.lightning_module, trainer.optimizers, state["groups"])
    changing_modules.adopt_shapes(trainer.lightning_module, state["shapes"])
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = joining.checkpoint_of(state)
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    for known in files:
        known.restore()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    assert trainer.fit_loop._data_fetcher is not None
    iter(trainer.fit_loop._data_fetcher)  # forgets what was fetched


def _known_checkpoints(trainer: Trainer, states: dict[str, Any]) -> list[KnownCheckpoints]:
    """Collective. Return what each ModelCheckpoint is to know."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    for callback in callbacks:
        getattr(callback, "before_hand_out", lambda: None)()
    return [KnownCheckpoints(trainer, callback, states) for callback in callbacks]


def finish(trainer: Trainer, state: dict[str, Any], results: dict[str, Any]) -> None:
    """Make the running loop what it was, at its first batch and before anything is fetched."""
    joining.enter_loop(trainer, state)
    own_results.take_back(trainer, results)
