"""What a joining rank receives from a live one, and how it enters the running epoch at the same batch.

Lightning's checkpoint holds most of the training state. What it leaves out and what the ranks must still have alike is
added here: random number generators, metrics seen so far, the keys of logged values, Lightning's own callbacks' private
notes about the last checkpoint.
"""

from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_ft.loops import logged_results
from lightning_ft.loops.saved_positions import drop_positions
from lightning_ft.strategies import changing_modules, tuning
from lightning_ft.trainer.verified_resume import VerifiedResume

PEER_CHECKPOINT = "ft://peer"
"""The ``ckpt_path`` that means: ask a live rank."""

_OWN_DATA = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "datamodule_hparams_name")


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Return everything about the training that a joiner must have alike.

    To be called between two batches: only there Lightning's counters of one batch agree with each other.
    """
    for callback in _callbacks(trainer):
        getattr(callback, "before_hand_out", lambda: None)()
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for key in _OWN_DATA:  # arbitrary objects, which the joiner has made by itself
        checkpoint.pop(key, None)
    drop_positions(checkpoint["loops"]["fit_loop"])  # they travel by themselves, with the step under way
    connector = trainer._logger_connector
    return {
        "checkpoint": checkpoint,
        "groups": changing_modules.describe_groups(trainer.lightning_module, trainer.optimizers),
        "shapes": changing_modules.describe_shapes(trainer.lightning_module),
        "flags": changing_modules.describe_flags(trainer.lightning_module),
        "gradients": _accumulated_gradients(trainer.lightning_module),
        "random": _collect_rng_states(include_cuda=False),
        "callbacks": [_private_notes(callback) for callback in _callbacks(trainer)],
        "results": [logged_results.describe(loop._results) for loop in logged_results.loops_that_log(trainer)],
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
        "should_stop": trainer.should_stop,
        "resumed_from": VerifiedResume.of(trainer).resumed_from,
        "attempt": trainer.strategy.attempt,  # type: ignore[attr-defined]
        "last_reload_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
        "validation": validation_data(trainer),
        "found": tuning.found(trainer, trainer.lightning_module),
    }


def validation_data(trainer: Trainer) -> int | float | None:
    """Return in which epoch this rank got its validation data, or None if it has none yet."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    return None if val_loop._combined_loader is None else val_loop._last_val_dl_reload_epoch


def set_up_data(trainer: Trainer, state: dict[str, Any] | None = None) -> None:
    """Make the loaders; with the ``state`` that a joiner received, as they were made in the rank that it came from."""
    if state is None:
        trainer.fit_loop.setup_data()
        if trainer.enable_validation:
            _set_up_validation_data(trainer)
    elif trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        epoch = trainer.fit_loop.epoch_progress.current
        epoch.completed = state["last_reload_epoch"]  # what the user's hook asks for; restored with the loops
        trainer.fit_loop._combined_loader = None
        trainer.fit_loop.setup_data()
        if state["validation"] is not None:
            epoch.completed = max(0, state["validation"])
            trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
            _set_up_validation_data(trainer)


def _set_up_validation_data(trainer: Trainer) -> None:
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.training = True


def checkpoint_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the peer's checkpoint, to be changed by hooks that load it, as some do."""
    checkpoint = state["checkpoint"]
    return {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}


def begin_epoch(trainer: Trainer, state: dict[str, Any], own_groups: list[Any]) -> None:
    """Call the hooks that begin the epoch in which this rank joins, as the other ranks did; before it takes part.

    Lightning leaves them out when it resumes within an epoch, but what they set up, the hooks that end the epoch use.
    What these hooks and ``on_train_start`` did to the weights, to optimizers and to callbacks' state does not stay: the
    peer did it long ago, and went on from there. They find the optimizers as this rank configured them, since they may add
    a group, which the peer has already.
    """
    with changing_modules.grouped_as(own_groups, trainer.optimizers):
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
    changing_modules.adopt_shapes(trainer.lightning_module, state["shapes"])
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint_of(state)
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = {}


def enter_loop(trainer: Trainer, state: dict[str, Any]) -> None:
    """Make this rank's running loop the same as its source's; called at its first batch, before anything is fetched."""
    changing_modules.adopt_flags(trainer.lightning_module, state["flags"])
    epoch_loop = trainer.fit_loop.epoch_loop
    # To Lightning this is no resumption any more: one would, for example, leave out a step of `ReduceLROnPlateau`.
    trainer.fit_loop._restarting = epoch_loop._restarting = epoch_loop.val_loop._restarting = False
    for callback, notes in zip(_callbacks(trainer), state["callbacks"], strict=True):
        vars(callback).update(notes)
    connector = trainer._logger_connector
    # Without these the first `self.log` would reset the keys below.
    connector._first_loop_iter, connector._current_fx = state["first_loop_iter"], state["current_fx"]
    connector._callback_metrics.update(state["callback_metrics"])
    connector._logged_metrics.update(state["logged_metrics"])
    for loop, descriptions in zip(logged_results.loops_that_log(trainer), state["results"], strict=True):
        logged_results.take_over(trainer, loop._results, descriptions)
    trainer.should_stop = state["should_stop"]
    VerifiedResume.of(trainer).resumed_from = state["resumed_from"]  # which is never removed, if its path was given
    trainer.strategy.attempt = state["attempt"]  # type: ignore[attr-defined]
    tuning.adopt(trainer, trainer.lightning_module, state["found"])
    parameters = dict(trainer.lightning_module.named_parameters())
    for name, gradient in state["gradients"].items():
        parameters[name].grad = gradient.to(parameters[name].device)
    if state["validation"] is None:  # this rank has its data already, but the others will set theirs up together
        epoch_loop.val_loop._combined_loader = None
    else:
        epoch_loop.val_loop._last_val_dl_reload_epoch = state["validation"]
    _set_rng_states(state["random"])


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def _accumulated_gradients(pl_module: LightningModule) -> dict[str, Tensor]:
    """Averages that manual optimization has not applied yet, the same on all ranks; automatic optimization keeps none."""
    if pl_module.automatic_optimization:
        return {}
    named = pl_module.named_parameters()
    gradients = {name: parameter.grad.detach() for name, parameter in named if parameter.grad is not None}
    return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in gradients.items()}


def _private_notes(callback: Callback) -> dict[str, Any]:
    """What checkpoint callbacks and Lightning's others keep out of ``state_dict``, such as the step of the last save."""
    if not isinstance(callback, ModelCheckpoint) and not type(callback).__module__.startswith("lightning."):
        return {}
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in vars(callback).items()
        if name.startswith(("_last", "_defer", "_restarting")) and isinstance(value, plain)
    }
