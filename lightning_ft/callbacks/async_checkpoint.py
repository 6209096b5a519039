"""A ModelCheckpoint that does not keep the training waiting, and whose checkpoints are there whole or not at all."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_ft.callbacks.begun_save import BegunSave, link
from lightning_ft.callbacks.resumable_checkpoint import ResumableCheckpoint
from lightning_ft.callbacks.shared_names import check_names
from lightning_ft.checkpoint.async_saver import AsyncSaver
from lightning_ft.checkpoint.leftovers import discard
from lightning_ft.checkpoint.pending_save import PendingSave
from lightning_ft.checkpoint.reader import paths_in
from lightning_ft.checkpoint.snapshot import Fence
from lightning_ft.checkpoint.store_path import is_store, place
from lightning_ft.elastic.checks import check_choice, check_count, check_seconds
from lightning_ft.errors import CheckpointNotCommittedError
from lightning_ft.events.log import EventLog
from lightning_ft.trainer.checkpoint_content import content_of
from lightning_ft.trainer.saving_peers import agree_on_run_id, peers_of

log = logging.getLogger(__name__)

_Kind = Literal["last", "top_k"]
_PATIENCE_AFTER_AN_EXCEPTION = timedelta(seconds=20)


class AsyncCheckpoint(ResumableCheckpoint):
    """Saves checkpoints while the training goes on; one that was not committed as a whole does not exist.

    It has all options of ``ModelCheckpoint``. A checkpoint is a directory, which keeps the name that they give it.
    Parameters and optimizer state are copied to memory under the next forward and backward pass, and optimizers wait for
    the copy; a process of its own writes it. Ranks with equal state divide the writing. Older checkpoints are removed only
    once the one that replaces them is there.

    Args:
        dirpath: Directory to save in, or an address of fsspec such as ``s3://bucket/run``.
        filename: Name of the checkpoints.
        on_save_error: ``"warn"``: a save that failed is told once, and the training goes on; ``"raise"``: it ends when the
            next one begins, or the fit ends.
        max_pending: How many saves may be under way; so many copies of the state are held in memory.
        when_busy: What becomes of one more: ``"wait"``, or ``"skip"``; was the newest one skipped, the training's end saves.
        timeout: Seconds after which a save is given up that some rank has not written.
        resume: ``"auto"``: a fit without ``ckpt_path`` resumes from the newest intact checkpoint in ``dirpath``.
        kwargs: The other options of ``ModelCheckpoint``.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: If ``dirpath`` is in the memory of each rank, or another callback saves under the same
            names.

    Example::

        Trainer(callbacks=[AsyncCheckpoint(every_n_train_steps=100)])

    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        on_save_error: Literal["warn", "raise"] = "warn",
        max_pending: int = 1,
        when_busy: Literal["wait", "skip"] = "wait",
        timeout: float = 1800.0,
        resume: Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        self._saver: AsyncSaver | None = None
        super().__init__(dirpath, filename, resume=resume, **kwargs)
        name = type(self).__name__
        check_choice(name, "on_save_error", on_save_error, ("warn", "raise"))
        check_choice(name, "when_busy", when_busy, ("wait", "skip"))
        check_count(name, "max_pending", max_pending, least=1)
        check_seconds(name, "timeout", timeout)
        self.on_save_error = on_save_error
        self.max_pending = max_pending
        self.when_busy = when_busy
        self.timeout = timeout
        self._trainer: Trainer | None = None
        self._run_id = ""
        self._fence: Fence | None = None
        self._saves: deque[BegunSave] = deque()
        self._newest: str | None = None
        self._in_store: set[str] = set()
        """What is there, so that the training need not ask the store, and wait for it, whenever something is saved."""
        self._told = (-1, "")
        self._is_raising = False
        self._is_last = False
        self._retry: set[_Kind] = set()
        self._skipped: set[_Kind] = set()
        self._seen_changes: int | None = None
        self._before: tuple[dict[str, Tensor], str, str] = ({}, "", "")

    def wait_for_copy(self) -> None:
        """Return once parameters and optimizer state may change; only needed before changes that no optimizer makes."""
        if self._saver is not None:
            self._saver.wait_for_copy()

    @override
    def finish_saves(self) -> None:
        """Return once every save that was begun is there, or has failed."""
        if self._saver is not None:
            self._saver.wait()

    def before_hand_out(self) -> None:
        """Make sure that this callback's state, which a joining rank is about to get, names no checkpoint that failed."""
        self.finish_saves()
        for index, save in enumerate(self._saves):
            save.take_back(self, islice(self._saves, index + 1, None))

    # Hooks.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if str(self.dirpath).startswith("memory://") and trainer.world_size > 1:
            raise MisconfigurationException(
                f"`{type(self).__name__}` saves together with all ranks, and each has a `{self.dirpath}` of its own. Use a"
                " `dirpath` that they share."
            )
        self._trainer = trainer
        if stage == TrainerFn.FITTING and not self._run_id:
            self._run_id = agree_on_run_id(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        check_names(self, [one for one in trainer.checkpoint_callbacks if not isinstance(one, AsyncCheckpoint)])
        if is_store(str(self.dirpath)):  # leftovers are collected by now
            self._in_store = paths_in(self._places(str(self.dirpath)))
        self._seen_changes = None
        self._close_fence()
        self._fence = Fence(trainer.optimizers, self.wait_for_copy)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        changes = getattr(trainer.strategy, "num_changes", None)
        if changes != self._seen_changes:
            self._seen_changes = changes
            self._settle(0)
            self._save_again(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.wait_for_copy()  # other callbacks put other weights in place for it

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.wait_for_copy()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._settle(0)
        self._retry |= self._skipped
        while self._save_again(trainer):
            self._settle(0)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._is_raising = True
        try:
            self._wait_a_little()
            super().on_exception(trainer, pl_module, exception)
            self._wait_a_little()
        except TimeoutError as error:  # of other ranks, perhaps, which are not there any more
            log.warning("%s", error)
        finally:
            self._is_raising = False
            self._close()  # there is no teardown after an exception

    def _wait_a_little(self) -> None:
        if self._saver is not None:
            self._saver.wait(_PATIENCE_AFTER_AN_EXCEPTION)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._close_fence()
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        self._saves.clear()

    def _close_fence(self) -> None:
        if self._fence is not None:
            self._fence.close()
            self._fence = None

    # Saving.

    @override
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self._skips(trainer, "top_k"):
            return
        self._begin(is_last=False)
        super()._save_topk_checkpoint(trainer, monitor_candidates)

    @override
    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_last and self._skips(trainer, "last"):
            return
        if self.save_last and self.save_last != "link":
            self._begin(is_last=True)
        super()._save_last_checkpoint(trainer, monitor_candidates)

    @override
    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Collective. Those of rank 0: what is logged without `sync_dist` differs by rank, and so would names."""
        candidates = super()._monitor_candidates(trainer)
        if self._is_raising:  # perhaps in this rank only
            return candidates
        values: dict[str, Tensor] = trainer.strategy.broadcast({name: value.cpu() for name, value in candidates.items()})
        return {name: value.to(trainer.strategy.root_device) for name, value in values.items()}

    def _skips(self, trainer: Trainer, kind: _Kind) -> bool:
        """Collective, if saves may be skipped. Whether this one is, on all ranks alike."""
        self._is_last = kind == "last"
        if self.when_busy == "wait" or self._is_raising:
            return False
        under_way = 0 if self._saver is None else sum(not save.is_twin for save in self._saver.pending)
        busy = under_way >= self.max_pending and self._twin() is None
        if trainer.strategy.broadcast(busy):
            log.info("Skipped a save in step %d: an earlier one is still being written.", trainer.global_step)
            self._skipped.add(kind)
            return True
        self._skipped.discard(kind)
        return False

    def _begin(self, *, is_last: bool) -> None:
        """Make room for a save, before the bookkeeping of the next one begins."""
        self._is_last = is_last
        if self._twin() is None:
            self._settle(self.max_pending - 1)
        self._before = dict(self.best_k_models), self.best_model_path, self.last_model_path

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Collective. Begin to save."""
        twin = self._twin()
        if twin is None:
            self._settle(self.max_pending - 1)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        content, may_change = content_of(trainer, checkpoint, self._run_id)
        replaced = self._replaced_by(trainer, filepath)
        saver = self._saver = self._saver or self._make_saver(trainer)
        paths = [place(path) for path in replaced]
        with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
            pending = saver.save(filepath, content, replaces=paths, may_change=may_change, twin_of=twin)
        self._saves.append(BegunSave(pending, filepath, self._is_last, replaced, *self._before))
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if hasattr(trainer.lightning_module, "saved_models"):  # for which ModelCheckpoint changes weights meanwhile
            self.wait_for_copy()

    def _twin(self) -> PendingSave | None:
        """Return a save of this very state: the one before that of ``last``."""
        if not (self._is_last and self._saves and self._trainer is not None):
            return None
        pending = self._saves[-1].pending
        return pending if pending.step == self._trainer.global_step and not pending.is_twin else None

    def _make_saver(self, trainer: Trainer) -> AsyncSaver:
        peers = peers_of(trainer, self._run_id)
        timeout = timedelta(seconds=self.timeout)
        return AsyncSaver(peers, timeout=timeout, max_pending=self.max_pending, on_settled=self._tell)

    def _replaced_by(self, trainer: Trainer, filepath: str) -> list[str]:
        """Return what ModelCheckpoint is going to remove after the save that begins."""
        best_k_models, best_model_path, last_model_path = self._before
        if self._is_last:
            paths = [last_model_path]
        elif self.monitor is not None:
            paths = [path for path in best_k_models if path not in self.best_k_models]
        else:
            paths = [best_model_path] if self.save_top_k == 1 else []
        return [path for path in paths if path and self._should_remove_checkpoint(trainer, path, filepath)]

    @override
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Leave it to the commit of the save that replaces it."""
        if self._saves and filepath in self._saves[-1].replaced:
            return
        self._in_store.discard(filepath)
        if not is_store(filepath):
            super()._remove_checkpoint(trainer, filepath)
        elif trainer.is_global_zero:
            discard(place(filepath))

    @override
    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Collective. Whether there is such a checkpoint, or will be."""
        begun = any(
            os.fspath(filepath) == save.filepath and not (save.pending.done and save.pending.error)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, AsyncCheckpoint)
            for save in callback._saves
        )
        there = trainer.is_global_zero and (begun or self._is_there(os.fspath(filepath)))
        return trainer.strategy.reduce_boolean_decision(there, all=False)

    def _is_there(self, filepath: str) -> bool:
        return filepath in self._in_store if is_store(filepath) else os.path.exists(filepath)

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        """Link to a checkpoint once it is there."""
        if not trainer.is_global_zero:
            return
        if self._saves and self._saves[-1].filepath == filepath:
            self._saves[-1].pending.then(lambda: link(filepath, linkpath))
        elif os.path.lexists(filepath):
            link(filepath, linkpath)

    def _save_again(self, trainer: Trainer) -> bool:
        """Collective. Save what deaths of ranks kept from being saved, of the step that it is now; return whether."""
        kinds = trainer.strategy.broadcast(sorted(self._retry))
        self._retry.clear()
        if not kinds or self._should_skip_saving_checkpoint(trainer):
            return False
        candidates = self._monitor_candidates(trainer)
        if "top_k" in kinds:
            self._save_topk_checkpoint(trainer, candidates)
        if "last" in kinds:
            self._save_last_checkpoint(trainer, candidates)
        return True

    # What became of saves.

    def _tell(self, save: PendingSave) -> None:
        """Say at once, in the thread of the save, that it failed."""
        self._record(save)
        if save.error is None:
            self._newest = str(save.target)
            self._in_store.add(self._newest)
            self._in_store.difference_update(map(str, save.replaces))
            return
        if isinstance(save.error, CheckpointNotCommittedError):
            step, reason, because_of_death, _ = save.error.args
            save.error = CheckpointNotCommittedError(step, reason, because_of_death, self._newest)
            if save.is_twin and (step, reason) == self._told:
                return
            self._told = (step, reason)
        if self._trainer is not None and self._trainer.is_global_zero and self.on_save_error == "warn":
            log.warning("%s", save.error)

    def _record(self, save: PendingSave) -> None:
        events: EventLog | None = getattr(getattr(self._trainer, "strategy", None), "events", None)
        if events is None:
            return
        about: dict[str, Any] = {"path": str(save.target), "step": save.step}
        if save.error is not None:
            events.emit("checkpoint_failed", **about, error=str(save.error))
            return
        spent = {"ms": round(1e3 * save.write_seconds, 2), "stall_ms": round(1e3 * save.stall_seconds, 2)}
        spent |= {"weights_only": True} if self.save_weights_only else {}
        events.emit("checkpoint", **about, **spent, replaces=[str(path) for path in save.replaces])

    def _settle(self, num_left: int) -> None:
        """Wait for all but the newest saves, and take those that failed out of the bookkeeping; all ranks alike."""
        while self._saves and (sum(not save.pending.is_twin for save in self._saves) > num_left or not num_left):
            save = self._saves.popleft()
            try:
                with self._as_checkpointing():
                    save.pending.wait()
            except CheckpointNotCommittedError as error:
                save.take_back(self, self._saves)
                if self._seen_changes is not None and error.because_of_death:
                    self._retry.add("last" if save.is_last else "top_k")
                elif self.on_save_error == "raise":
                    raise
            else:
                self._report(save)

    def _as_checkpointing(self) -> AbstractContextManager[Any]:
        """Have whoever watches for hangs know that this rank waits for storage."""
        engine: Any = getattr(getattr(self._trainer, "strategy", None), "engine", None)
        return nullcontext() if engine is None else engine.activity.during("checkpoint")

    def _report(self, save: BegunSave) -> None:
        trainer = self._trainer
        assert trainer is not None
        if trainer.is_global_zero:
            metrics = {
                "ft/checkpoint_write_s": save.pending.write_seconds,
                "ft/checkpoint_stall_ms": 1e3 * save.pending.stall_seconds,
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=save.pending.step)
                logger.after_save_checkpoint(proxy(self))
