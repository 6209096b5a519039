"""What a Trainer call left behind, for ranks that start later and pass over it: their script goes on with the same.

That is what it returned, the counters, the metrics, the paths of the checkpoints and what the learning rate finder found.
The weights are too much to keep: those, such a rank gets when it joins.
"""

import logging
import pickle
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ft.elastic.engine import Engine
from lightning_ft.strategies import tuning

log = logging.getLogger(__name__)

_EVALUATIONS = (TrainerFn.VALIDATING, TrainerFn.TESTING)


def remember(engine: Engine, trainer: Trainer, returned: Any) -> None:
    """Keep what the call that ends left behind; predictions are another rank's, and may be large.

    Args:
        engine: Keeps it; rank 0's counts.
        trainer: Whose call it is.
        returned: What it returns.

    """
    if engine.alone or engine.rank != 0:
        return
    left = {
        "returned": returned if trainer.state.fn in _EVALUATIONS else None,
        "fitted": trainer.state.fn == TrainerFn.FITTING,
        "progress": trainer.fit_loop.state_dict(),
        "metrics": dict(trainer._logger_connector._callback_metrics),
        "callbacks": [callback.state_dict() for callback in _with_results(trainer)],
        "found": tuning.found(trainer, trainer.lightning_module),
    }
    try:
        engine.record(f"call/{engine.call}", pickle.dumps(left))
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # metrics of the user's own kind, perhaps
        log.debug("What call %s left is not remembered: %s", engine.call, error)


def recall(engine: Engine, trainer: Trainer, model: LightningModule | None) -> Any:
    """Leave in the trainer what the call left that this rank passes over, and return what it returned."""
    value = engine.recorded(f"call/{engine.call}")
    if value is None:
        return None
    left = pickle.loads(value)
    trainer.fit_loop.load_state_dict(left["progress"])
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    trainer._logger_connector._callback_metrics.update(left["metrics"])
    for callback, state in zip(_with_results(trainer), left["callbacks"], strict=True):
        if isinstance(callback, Checkpoint) and hasattr(callback, "dirpath"):
            callback.dirpath = state.get("dirpath", callback.dirpath)  # chosen in the call
        callback.load_state_dict(state)
    tuning.adopt(trainer, model, left["found"])
    return left["returned"]


def have_fitted(engine: Engine) -> bool:
    """Whether a call before this one trained the module, as far as that is known."""
    values = [engine.recorded(f"call/{call}") for call in range(engine.call)]
    return any(value is None or pickle.loads(value)["fitted"] for value in values)


def _with_results(trainer: Trainer) -> list[Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Checkpoint | EarlyStopping)]
