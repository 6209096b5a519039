"""Saves and loads a whole training without a Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_ft.checkpoint.layout import Manifest
from lightning_ft.checkpoint.lightning_dict import STATE_DICT, optimizer_key
from lightning_ft.checkpoint.module_state import as_sequence, changing, state_of
from lightning_ft.checkpoint.pending_save import Content, PendingSave
from lightning_ft.checkpoint.process_saver import process_saver
from lightning_ft.checkpoint.reader import DefaultGroup, ReadingRanks, check
from lightning_ft.checkpoint.sharded_reading import read_state
from lightning_ft.checkpoint.store_path import Place, place
from lightning_ft.checkpoint.timed_group import TimedGroup
from lightning_ft.checkpoint.training_metadata import (
    RankLocalTransform,
    SharedState,
    TrainingMetadata,
    content_of,
    read_metadata,
    read_shared,
)
from lightning_ft.checkpoint.verify import Thoroughness
from lightning_ft.data.random_state import random_state, set_random_state
from lightning_ft.errors import MalformedStateError, StateNotLoadedError

_Path = str | os.PathLike[str]
_T = TypeVar("_T")
_LONG = timedelta(minutes=30)


def save_sharded(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: _Path,
    *,
    timeout: timedelta = _LONG,
) -> None:
    """Collective. Save a module and its optimizers; return once the checkpoint is there as a whole.

    Args:
        module: Replicated or sharded with FSDP2, wrapped in DistributedDataParallel or compiled.
        optimizer: Of its parameters; several in the order in which they are to be loaded; None saves weights only.
        path: The directory that it becomes, or an address of fsspec such as ``s3://bucket/name``. One that is there is
            replaced once this one is whole.
        timeout: When it is given up that some rank has not written.

    Raises:
        CheckpointNotCommittedError: On all ranks, if any of them failed; what was at ``path`` is untouched.
        CollectiveTimeoutError: If rank 0 does not come.

    """
    saver = process_saver(timeout)
    optimizers = as_sequence(optimizer)
    manifest = Manifest(step=0, epoch=0, run_id=saver.run_id, world_size=1, shard_size=1, files=())
    content = Content(state_of(module, optimizers), lambda seat: {}, manifest)
    with saver.quietly():
        saver.save(place(path), content, optimizers, changing(module), (), timeout).wait()


def load_sharded(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: _Path,
    *,
    strict: bool = True,
    thoroughness: Thoroughness = "full",
    weights_only: bool | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Collective. Load a checkpoint that any number of ranks saved, sharded in any way or not at all.

    It is verified, and read, before anything is changed; on all ranks or on none.

    Args:
        module: Its parameters are DTensors or plain tensors.
        optimizer: Of the module's parameters; several in the order in which they were saved; None loads weights only.
        path: The checkpoint: one of this package, of torch's ``dcp.save`` with the same names, or a directory of Lightning.
        strict: Whether the checkpoint must have exactly the names that the module has.
        thoroughness: How much of it is verified.
        weights_only: For what is not a tensor, as in ``torch.load``.
        timeout: How long ranks wait for each other; None: as long as in other operations of their process group.

    Raises:
        DamagedCheckpointError: If it is not what was saved.
        MalformedStateError: If it does not fit.
        StateNotLoadedError: If that happened on another rank.
        CollectiveTimeoutError: If a rank does not come within ``timeout``; nothing was loaded in the others.

    """
    ranks, where = _ranks("load_sharded", timeout), place(path)
    check(str(where), ranks, thoroughness)
    read = _together(
        ranks, lambda: read_state(module, as_sequence(optimizer), where, strict=strict, weights_only=weights_only)
    )
    read.apply()


def save_training_state(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: _Path,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    loader_state: Any = None,
    parallel_plan: Any = None,
    typed_scheduler_state: Any = None,
    extra: dict[str, Any] | None = None,
    replaces: Collection[_Path] = (),
    timeout: timedelta = _LONG,
) -> None:
    """Collective. Save a whole training; return once the checkpoint is there.

    See :func:`async_save_training_state` for the arguments.

    Raises:
        CheckpointNotCommittedError: On all ranks, if any of them failed; what was at ``path`` is untouched.

    """
    saver = process_saver(timeout)
    with saver.quietly():
        async_save_training_state(
            module,
            optimizer,
            path,
            step=step,
            scheduler=scheduler,
            scaler=scaler,
            loader_state=loader_state,
            parallel_plan=parallel_plan,
            typed_scheduler_state=typed_scheduler_state,
            extra=extra,
            replaces=replaces,
            timeout=timeout,
        ).wait()


def async_save_training_state(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: _Path,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    loader_state: Any = None,
    parallel_plan: Any = None,
    typed_scheduler_state: Any = None,
    extra: dict[str, Any] | None = None,
    replaces: Collection[_Path] = (),
    timeout: timedelta = _LONG,
) -> PendingSave:
    """Collective. Begin to save a whole training; it is written and committed though nobody waits, at the latest at exit.

    Parameters and optimizers' states are copied under what follows, and the next step of an optimizer waits for that; call
    the returned save's ``wait_for_copy()`` before changing them in any other way. A save that comes while one is under way
    waits for it first. A failure is logged by rank 0, and raised by ``wait()``. Plain buffers, which ranks need not have
    alike, are those of rank 0.

    Args:
        module: Replicated or sharded with FSDP2, wrapped in DistributedDataParallel or compiled.
        optimizer: Of its parameters; one, several, or None.
        path: The directory that it becomes, or an address of fsspec such as ``s3://bucket/name``. One that is there is
            replaced once this one is whole.
        step: Optimizer steps completed.
        scheduler: Of the learning rate: an object with ``state_dict``, or its state.
        scaler: Of gradients, alike.
        loader_state: This rank's place in the data: an object with ``state_dict`` or ``to_dict``, or plain data.
        parallel_plan: How the module is divided, for whoever loads it.
        typed_scheduler_state: This rank's scheduler of data, alike.
        extra: Anything else that all ranks have alike: plain data and tensors.
        replaces: Checkpoints that are removed once this one is there.
        timeout: When it is given up that some rank has not written.

    Returns:
        The save: ``done``, ``wait(timeout=None)``, ``error``.

    Raises:
        TypeError: If ``step`` is no integer.
        ValueError: If ``step`` is negative.
        CollectiveTimeoutError: If rank 0 does not come.

    """
    optimizers, saver = as_sequence(optimizer), process_saver(timeout)
    kinds = tuple(type(one).__name__ for one in optimizers)
    shared = SharedState(_checked(step), scheduler, scaler, parallel_plan, extra, kinds)
    own = {"loader_state": loader_state, "typed_scheduler_state": typed_scheduler_state, "rng": _random_state()}
    content = content_of(state_of(module, optimizers), shared, own, saver.run_id)
    replaced = [place(old) for old in replaces]
    return saver.save(place(path), content, optimizers, changing(module), replaced, timeout)


def save_frozen_training_state(
    model_state: dict[str, Any],
    optimizer_state: dict[str, Any] | Sequence[dict[str, Any]] | None,
    path: _Path,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    loader_state: Any = None,
    parallel_plan: Any = None,
    typed_scheduler_state: Any = None,
    extra: dict[str, Any] | None = None,
    replaces: Collection[_Path] = (),
    timeout: timedelta = _LONG,
) -> None:
    """Collective. Save states that nobody changes any more, in any thread, beside other saves; return once it is there.

    ``model_state`` is as ``get_model_state_dict`` returns it, ``optimizer_state`` as ``get_optimizer_state_dict``: one,
    several, or None. For the other arguments see :func:`async_save_training_state`. All ranks save under the same paths,
    and the process group of the time of the call must be that of the process's other saves.

    Raises:
        CheckpointNotCommittedError: On all ranks, if any of them failed; what was at ``path`` is untouched.

    """
    states = () if optimizer_state is None else (optimizer_state,) if isinstance(optimizer_state, dict) else optimizer_state
    shared = SharedState(_checked(step), scheduler, scaler, parallel_plan, extra, (None,) * len(states))
    own = {"loader_state": loader_state, "typed_scheduler_state": typed_scheduler_state, "rng": _random_state()}
    state = {STATE_DICT: model_state, **{optimizer_key(index): one for index, one in enumerate(states)}}
    saver = process_saver(timeout)
    content = content_of(state, shared, own, saver.run_id)
    saver.save_frozen(place(path), content, [place(old) for old in replaces], timeout)


def load_training_state(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    path: _Path,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    restore_rng: bool = True,
    allow_world_size_change: bool = False,
    rank_local_transform: RankLocalTransform | None = None,
    timeout: timedelta | None = None,
) -> TrainingMetadata:
    """Collective. Load a whole training; everything is verified, read and found to fit on all ranks before it is changed.

    Args:
        module: See :func:`load_sharded`.
        optimizer: As many as were saved.
        path: The checkpoint.
        scheduler: Gets the state of the one that was saved.
        scaler: Alike.
        restore_rng: Whether random numbers go on where this rank's were.
        allow_world_size_change: Whether another number of ranks may have saved it.
        rank_local_transform: Needed then, and not allowed otherwise; see :data:`RankLocalTransform`.
        timeout: See :func:`load_sharded`.

    Returns:
        What else was saved.

    Raises:
        DamagedCheckpointError: If it is not what was saved.
        MalformedStateError: If it does not fit.
        StateNotLoadedError: If that, or an error of ``rank_local_transform``, happened on another rank.
        CollectiveTimeoutError: If a rank does not come within ``timeout``.
        WorldSizeChangedError: If another number of ranks saved it, and that is not allowed.
        ValueError: If ``rank_local_transform`` is missing, not needed, or returns other fields, or there is no state for
            ``scheduler`` or ``scaler``.
        TypeError: If it returns no dict.

    """
    ranks, where = _ranks("load_training_state", timeout), place(path)
    check(str(where), ranks)
    optimizers = as_sequence(optimizer)

    def read() -> tuple[TrainingMetadata, Any]:
        metadata = read_metadata(where, ranks, rank_local_transform, allow_world_size_change)
        _check_kinds(where, optimizers)
        for name, target in (("scheduler", scheduler), ("scaler", scaler)):
            if target is not None and getattr(metadata, name) is None:
                raise ValueError(f"`load_training_state({name}=...)`: {where} has no state of a {name}. Leave it out.")
        return metadata, read_state(module, optimizers, where)

    metadata, state = _together(ranks, read)
    state.apply()
    if scheduler is not None:
        scheduler.load_state_dict(metadata.scheduler)
    if scaler is not None:
        scaler.load_state_dict(metadata.scaler)
    if restore_rng and metadata.rng is not None:
        _set_random_state(metadata.rng)
    return metadata


# Saving.


def _checked(step: int) -> int:
    if type(step) is not int:
        raise TypeError(f"`save_training_state(step={step!r})` is not valid: expected an integer.")
    if step < 0:
        raise ValueError(f"`save_training_state(step={step})` is not valid: expected 0 or more.")
    return step


def _random_state() -> dict[str, Any]:
    state = random_state()
    return {**state, "cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, Any]) -> None:
    set_random_state(state)
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


# Loading.


def _ranks(operation: str, timeout: timedelta | None) -> ReadingRanks:
    return DefaultGroup() if timeout is None else TimedGroup(operation, timeout)


def _together(ranks: ReadingRanks, action: Callable[[], _T]) -> _T:
    """Collective. Do something on all ranks, and have it fail on all if it does on one."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    problem = ranks.first_problem(None if failure is None else f"rank {ranks.rank}: {type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if problem is not None:
        raise StateNotLoadedError(problem)
    return result  # type: ignore[return-value]


def _check_kinds(where: Place, optimizers: Sequence[Optimizer]) -> None:
    saved = read_shared(where)["optimizers"]
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    if len(saved) != len(kinds) or any(one not in (None, kind) for one, kind in zip(saved, kinds, strict=True)):
        raise MalformedStateError(f"the checkpoint has states of the optimizers {list(saved)}, to be loaded are {kinds}")
