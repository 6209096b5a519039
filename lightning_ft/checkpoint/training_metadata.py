"""What a checkpoint of a training holds beside module and optimizers.

``training.state`` is what all ranks have alike. Each rank's section holds its place in the data and its random numbers, and
never becomes another rank's by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from lightning_ft.checkpoint.layout import Manifest, rank_section_name
from lightning_ft.checkpoint.pending_save import Content
from lightning_ft.checkpoint.plan import Seat
from lightning_ft.checkpoint.rank_section import parse_section, section_bytes
from lightning_ft.checkpoint.reader import DefaultGroup, ReadingRanks
from lightning_ft.checkpoint.store_path import Place, place
from lightning_ft.checkpoint.verify import read_file, verify
from lightning_ft.errors import DamagedCheckpointError, WorldSizeChangedError

TRAINING_STATE = "training.state"
LOCAL_FIELDS = ("loader_state", "typed_scheduler_state", "rng")
"""What only one rank has."""

RankLocalTransform = Callable[[tuple[dict[str, Any], ...], int, int, int], dict[str, Any]]
"""Makes this rank's :data:`LOCAL_FIELDS` of those of all ranks that saved: ``(old, saved_world_size, rank, world_size)``."""


@dataclass(frozen=True)
class TrainingMetadata:
    """What a checkpoint holds beside module and optimizers.

    Args:
        step: Optimizer steps completed.
        scheduler: State of the learning rate's scheduler.
        scaler: State of the gradient scaler.
        parallel_plan: How the module was divided, as whoever saved it put it.
        extra: What else was saved.
        loader_state: This rank's place in the data.
        typed_scheduler_state: This rank's scheduler of data.
        rng: This rank's random numbers.
        world_size: How many ranks saved it.
        status: ``"native"``: as many ranks as now, and the three before are this rank's; ``"transformed"``: they were made
            for it; ``"transform_required"``: they are None, because they belong to other ranks.

    """

    step: int
    scheduler: Any
    scaler: Any
    parallel_plan: Any
    extra: Any
    loader_state: Any
    typed_scheduler_state: Any
    rng: Any = field(repr=False)
    world_size: int
    status: Literal["native", "transformed", "transform_required"]


def load_training_metadata(
    path: str | os.PathLike[str], *, rank_local_transform: RankLocalTransform | None = None
) -> TrainingMetadata:
    """Return what a checkpoint holds beside module and optimizers; each rank may call it by itself.

    Only what it reads is verified, and the sizes of other files.

    Args:
        path: The checkpoint.
        rank_local_transform: For a checkpoint of another number of ranks; without it what is local to ranks is None.

    Raises:
        DamagedCheckpointError: If it is not what was saved.
        ValueError: If ``rank_local_transform`` is not needed, or returns other fields.
        TypeError: If it returns no dict.

    """
    where = place(path)
    verify(where, "sizes")
    return read_metadata(where, DefaultGroup(), rank_local_transform, None)


@dataclass(frozen=True)
class SharedState:
    """What all ranks have alike; see :class:`TrainingMetadata`.

    Args:
        optimizers: The names of their classes; None: not known.

    """

    step: int
    scheduler: Any
    scaler: Any
    parallel_plan: Any
    extra: Any
    optimizers: tuple[str | None, ...]

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        return section_bytes({name: _plain(value) for name, value in vars(self).items()})


def content_of(state: dict[str, Any], shared: SharedState, own: dict[str, Any], run_id: str) -> Content:
    """Return what is to be saved.

    Args:
        state: Of module and optimizers.
        shared: What all ranks have alike.
        own: This rank's :data:`LOCAL_FIELDS`.
        run_id: Of the run.

    """
    agreed, encoded, failure = "", b"", None
    try:
        encoded = shared.to_bytes()
        agreed = xxhash.xxh3_128_hexdigest(encoded)
    except Exception as error:  # raised by the save, so that the other ranks learn of it
        failure = error

    def files(seat: Seat) -> dict[str, bytes]:
        if failure is not None:
            raise failure
        local = {name: _plain(value) for name, value in own.items()}
        section = {"rank": seat.rank, "world_size": seat.world_size, "state": local}
        named = {rank_section_name(seat.rank): section_bytes(section)}
        return {TRAINING_STATE: encoded, **named} if seat.rank == 0 else named

    manifest = Manifest(step=shared.step, epoch=0, run_id=run_id, world_size=1, shard_size=1, files=())
    return Content(state, files, manifest, agreed)


def _plain(value: Any) -> Any:
    for method in ("state_dict", "to_dict"):
        if callable(read := getattr(value, method, None)):
            return read()
    return value


def read_shared(where: Place) -> dict[str, Any]:
    """Return what all ranks that saved a checkpoint had alike."""
    try:
        return parse_section(read_file(where, TRAINING_STATE))
    except FileNotFoundError:
        reason = f"it has no {TRAINING_STATE}: `save_training_state` did not save it, but `load_sharded` may read it"
        raise DamagedCheckpointError(str(where), reason) from None


def read_metadata(
    where: Place, ranks: ReadingRanks, transform: RankLocalTransform | None, allow_change: bool | None
) -> TrainingMetadata:
    """Read it for this rank; ``allow_change`` is None for who only wants to look."""
    manifest = verify(where, "sizes")
    shared = read_shared(where)
    shared.pop("optimizers")
    assert manifest is not None, "only checkpoints with a manifest have that file"
    saved, rank, world_size = manifest.world_size, ranks.rank, ranks.size
    if saved == world_size:
        if transform is not None:
            raise ValueError(
                f"`rank_local_transform` is not needed: {saved} ranks saved {where}, as many as now. Leave it out."
            )
        return TrainingMetadata(**shared, **_section(where, rank), world_size=saved, status="native")
    if allow_change is False:
        raise WorldSizeChangedError(str(where), saved, world_size)
    if transform is None:
        if allow_change:
            raise ValueError(
                f"`allow_world_size_change=True` without `rank_local_transform`: {saved} ranks saved {where}, and"
                f" {world_size} load it. Give a function that makes a rank's {', '.join(LOCAL_FIELDS)} of those of all."
            )
        nobody: dict[str, Any] = dict.fromkeys(LOCAL_FIELDS)
        return TrainingMetadata(**shared, **nobody, world_size=saved, status="transform_required")
    own = transform(tuple(_section(where, old) for old in range(saved)), saved, rank, world_size)
    if not isinstance(own, dict):
        raise TypeError(f"`rank_local_transform` returned a {type(own).__name__}: expected a dict.")
    if own.keys() != set(LOCAL_FIELDS):
        raise ValueError(f"`rank_local_transform` returned {sorted(own)}: expected exactly {', '.join(LOCAL_FIELDS)}.")
    return TrainingMetadata(**shared, **own, world_size=saved, status="transformed")


def _section(where: Place, rank: int) -> dict[str, Any]:
    try:
        section = parse_section(read_file(where, rank_section_name(rank)))
    except FileNotFoundError:
        raise DamagedCheckpointError(str(where), f"{rank_section_name(rank)} is missing") from None
    return dict(section["state"])
