"""Has loaders resume in the middle of an epoch that know what is left of it.

Lightning makes the training loaders when the fit begins, and gives them their positions from the checkpoint as it does so.
Code that asks for ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` has them made before the checkpoint's
loops are restored: then Lightning forgets the positions, and the epoch would be trained from its first batch.
"""

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft.loops.saved_positions import LIGHTNINGS, OURS
from lightning_ft.strategies.training_data import TrainLoader

log = logging.getLogger(__name__)


def load_positions_late(trainer: Trainer, then: Callable[[], None]) -> None:
    """Have the fit loop load positions into loaders that are there already.

    Args:
        trainer: The trainer.
        then: Called when a fit that resumes has its loaders where they were.

    """
    fit_loop = trainer.fit_loop
    set_up_data = type(fit_loop).setup_data.__get__(fit_loop)

    def set_up_data_where_it_was() -> None:
        set_up_data()
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load and fit_loop._data_fetcher is not None:
            fit_loop._load_combined_loader_states()
            iter(fit_loop._data_fetcher)
        if fit_loop.restarting:
            then()

    fit_loop.setup_data = set_up_data_where_it_was  # type: ignore[method-assign]


def name_positions(trainer: Trainer, *, is_solo: bool, on_load: Callable[[bool], None] = lambda known: None) -> None:
    """Have the fit loop keep the positions of our loaders under a name of their own, and look for them there.

    Args:
        trainer: The trainer.
        is_solo: Whether a loader may be the user's own, whose position Lightning keeps.
        on_load: Told, for a checkpoint, whether anybody has positions for it, if they are not in there.

    """
    fit_loop: Any = trainer.fit_loop
    save, load = type(fit_loop).on_save_checkpoint.__get__(fit_loop), type(fit_loop).on_load_checkpoint.__get__(fit_loop)

    def save_ours() -> dict[str, Any]:
        state: dict[str, Any] = save()
        combined = fit_loop._combined_loader
        if LIGHTNINGS in state and all(getattr(loader, "keeps_position", False) for loader in combined.flattened):
            state[OURS] = state.pop(LIGHTNINGS)
        return state

    def load_ours(state: dict[str, Any]) -> None:
        positions = state.get(OURS)
        if positions is None and not is_solo and state.get(LIGHTNINGS):
            log.warning(
                "The checkpoint has the position of rank 0's loader, as it was under another strategy. It is left out."
            )
        if not positions:
            on_load(positions is not None)
        if positions is not None and is_solo and any("num_slots" not in position for position in positions):
            raise MisconfigurationException(
                "The checkpoint was taken in the middle of an epoch whose data was a stream of each rank, but this process"
                " is the only one and reads its data by itself. Resume with `lightning-ft run` on as many ranks as there"
                " were, or from the end of an epoch."
            )
        if positions is not None or not is_solo:
            state = {**state, LIGHTNINGS: positions or []}
        load(state)

    fit_loop.on_save_checkpoint, fit_loop.on_load_checkpoint = save_ours, load_ours


def go_on_from_other_strategy(trainer: Trainer, loader: TrainLoader, num_slots: int) -> None:
    """Continue behind the batches that were trained of the epoch, where a checkpoint only says how many of each rank.

    Under Lightning's own strategies a sampler deals to ranks as this one does without faults.
    """
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress.current
    trained = fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    trained -= trained % trainer.accumulate_grad_batches  # what a window had gathered is lost
    if not trained or epochs.started == epochs.processed:
        return
    try:
        loader.load_trained(epochs.processed, num_slots, trained)
    except ValueError as error:
        log.warning("%s The epoch begins with its first batches.", error)
        return
    assert fit_loop._data_fetcher is not None
    iter(fit_loop._data_fetcher)
    log.warning(
        "The checkpoint is another strategy's and does not say what was trained of epoch %s. It goes on behind the first %s"
        " batches of each rank, which is right if it was made on %s ranks.",
        epochs.processed,
        trained,
        num_slots,
    )
