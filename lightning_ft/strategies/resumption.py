"""Has loaders that were made early resume in the middle of an epoch too.

Lightning makes the training loaders when the fit begins, and gives them their positions from the checkpoint as it does so.
Code that asks for ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` has them made before the checkpoint's
loops are restored: then Lightning forgets the positions, and the epoch would be trained from its first batch.
"""

from lightning.pytorch import Trainer


def load_positions_late(trainer: Trainer) -> None:
    """Have the fit loop load positions into loaders that are there already."""
    fit_loop = trainer.fit_loop
    set_up_data = type(fit_loop).setup_data.__get__(fit_loop)

    def set_up_data_where_it_was() -> None:
        set_up_data()
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load and fit_loop._data_fetcher is not None:
            fit_loop._load_combined_loader_states()
            iter(fit_loop._data_fetcher)

    fit_loop.setup_data = set_up_data_where_it_was  # type: ignore[method-assign]
