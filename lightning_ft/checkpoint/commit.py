"""Makes what the ranks wrote a checkpoint, as a whole or not at all.

All ranks write into one staging directory. Each posts what it wrote, or what failed. The first live one of them waits for
all posts, writes torch's metadata, and publishes all with the manifest: that is the commit. Then it posts the
verdict. If it dies, the next one takes its place and looks how far it came.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_ft.checkpoint._torch_compat import make_metadata
from lightning_ft.checkpoint.layout import METADATA, FileEntry, Manifest
from lightning_ft.checkpoint.peers import Peers, Roll
from lightning_ft.checkpoint.plan import Entry, describe, index_of
from lightning_ft.checkpoint.staging import PublishInDoubtError, Staging
from lightning_ft.checkpoint.store_path import Place, relative_to
from lightning_ft.errors import CheckpointNotCommittedError, StoreUnreachableError

log = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_Part = tuple[bytes, tuple[tuple[str, int, int], ...]]
"""Of a rank its table, and where its objects are."""

_last_metadata: tuple[tuple[list[_Part], dict[str, Any]] | None, bytes] = (None, b"")
"""What it was made of, and torch's metadata."""

_TIME_FOR_A_VERDICT = 30.0  # seconds that the others give to who decides, beyond the time in which it must


@dataclass(frozen=True)
class Table:
    """What a rank writes in every save, until the shape of the state or the ranks change.

    Args:
        file_name: The file with its tensors.
        entries: What is in it.
        places: Of each where it begins there, and its length.

    """

    file_name: str
    entries: tuple[Entry, ...]
    places: tuple[tuple[int, int], ...]

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        rows = [[*_row(entry), *place] for entry, place in zip(self.entries, self.places, strict=True)]
        return json.dumps([self.file_name, rows]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Table:
        """Read what :meth:`to_bytes` made."""
        file_name, rows = json.loads(data)
        return cls(file_name, tuple(_entry(*row[:5]) for row in rows), tuple((row[5], row[6]) for row in rows))


def _row(entry: Entry) -> list[Any]:
    return [entry.name, str(entry.dtype).removeprefix("torch."), entry.shape, entry.offsets, entry.sizes]


def _entry(name: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]) -> Entry:
    return Entry(name, getattr(torch, dtype), tuple(shape), tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Post:
    """What a rank says once it wrote, or failed to.

    Args:
        files: What it wrote.
        table: Key of its table.
        objects: Of each object where it begins in the file of tensors, and its length.
        error: What failed.
        target: The path that the checkpoint is to have.
        agreed: What all ranks must have alike.

    """

    files: tuple[FileEntry, ...] = ()
    table: str = ""
    objects: tuple[tuple[str, int, int], ...] = ()
    error: str | None = None
    target: str = ""
    agreed: str = ""

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Post:
        """Read what :meth:`to_bytes` made."""
        fields = json.loads(data)
        files = tuple(FileEntry(**file) for file in fields.pop("files"))
        return cls(files=files, objects=tuple(tuple(item) for item in fields.pop("objects")), **fields)


class Commit:
    """One save on its way to become a checkpoint.

    Args:
        peers: The ranks.
        roll: Who takes part.
        staging: Where all write, and what it becomes.
        manifest: Without files and what it replaces.
        mappings: From names to paths, for torch's metadata.
        timeout: When whoever has not written by then is given up.

    """

    def __init__(
        self,
        peers: Peers,
        roll: Roll,
        staging: Staging,
        manifest: Manifest,
        mappings: dict[str, Any],
        timeout: timedelta,
    ) -> None:
        self._peers = peers
        self._roll = roll
        self._staging = staging
        self._manifest = manifest
        self._mappings = mappings
        self._timeout = timeout.total_seconds()
        self._posts: dict[int, Post] = {}

    def settle(self, post: Post, replaces: Iterable[Place] = (), is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Post what this rank did; return once all is a checkpoint: whether this rank made it one.

        Args:
            post: What it did.
            replaces: Checkpoints that go with it, for the next start to remove if this one dies before it does.
            is_cancelled: Whether nobody waits for it any more.

        Raises:
            CheckpointNotCommittedError: If it does not become one.

        """
        rank = self._roll.seat.rank
        ways = [relative_to(path, self._staging.target.parent) for path in replaces]
        self._manifest = replace(self._manifest, replaces=tuple(way for way in ways if way is not None))
        self._peers.post(self._key(rank), replace(post, target=str(self._staging.target)).to_bytes())
        deadline = time.monotonic() + self._timeout
        for _ in _pauses():
            verdict = self._peers.peek(self._key("verdict"))
            lost = self._peers.lost(self._roll)
            decides = verdict is None and min(set(range(self._roll.seat.world_size)) - lost) == rank
            if decides:
                verdict = self._decide(lost, deadline)
            if verdict is None and (is_cancelled() or time.monotonic() > deadline + _TIME_FOR_A_VERDICT):
                verdict = _verdict(f"nobody decided within {self._timeout:g} s")
            if verdict is not None:
                break
        assert verdict is not None
        if decides:
            self._peers.post(self._key("verdict"), verdict)
        if verdict:
            fields = json.loads(verdict)
            if not fields.pop("in_doubt"):
                self._staging.discard()  # what this rank wrote there after it was dropped
            raise CheckpointNotCommittedError(self._manifest.step, **fields)
        return decides

    def forget(self) -> None:
        """Remove what this rank posted: all ranks are through with it."""
        self._peers.forget(self._key(self._roll.seat.rank))
        if self._roll.seat.rank == 0:
            self._peers.forget(self._key("verdict"))

    def _key(self, name: int | str) -> str:
        return f"save/{self._roll.token}/{name}"

    # Deciding.

    def _decide(self, lost: frozenset[int], deadline: float) -> bytes | None:
        """Return the verdict if it is time: empty if all is well, else what is not."""
        missing = self._missing()
        errors = [f"rank {rank} failed ({post.error})" for rank, post in sorted(self._posts.items()) if post.error]
        if errors:
            return _verdict("; ".join(errors))
        names = {post.target: rank for rank, post in sorted(self._posts.items(), reverse=True)}
        if len(names) > 1:
            told = "; ".join(f"rank {rank}: {name}" for name, rank in sorted(names.items(), key=lambda item: item[1]))
            return _verdict(f"the ranks give it different names ({told})")
        if len({post.agreed for post in self._posts.values()}) > 1:
            return _verdict("what must be the same on all ranks, such as the step, differs between them")
        if missing & lost:  # looked for after it was known that they died
            missing = self._missing()
        if not missing:
            return self._publish()
        if missing & lost:
            return _verdict(f"{_ranks(missing & lost)} died before writing its part", because_of_death=True)
        if time.monotonic() > deadline:
            return _verdict(f"{_ranks(missing)} did not write within {self._timeout:g} s")
        return None

    def _missing(self) -> set[int]:
        missing = set(range(self._roll.seat.world_size)) - self._posts.keys()
        for rank in list(missing):
            data = self._peers.peek(self._key(rank))
            if data is not None:
                self._posts[rank] = Post.from_bytes(data)
                missing.discard(rank)
        return missing

    def _publish(self) -> bytes:
        posts = [self._posts[rank] for rank in sorted(self._posts)]
        files = tuple(file for post in posts for file in post.files)
        rank, staging = self._roll.seat.rank, self._staging
        try:
            if rank > 0 and self._is_published(files):
                return b""
            sizes = staging.sizes()
            for file in files:
                if (size := sizes.get(file.path)) != file.size:
                    told = "is missing" if size is None else f"has {size} bytes where {file.size} were written"
                    return _verdict(f"{file.path} {told}")
            files += (staging.write(METADATA, self._metadata(posts)),)
            staging.publish(replace(self._manifest, files=files, created=time.time()))
        except PublishInDoubtError as error:
            told = f"{error.reason}, when rank {rank} committed it"
            return b"" if self._is_published(files) else _verdict(told, in_doubt=True)
        except (OSError, StoreUnreachableError) as error:
            return _verdict(f"{tell_os_error(error)}, when rank {rank} committed it")
        return b""

    def _is_published(self, files: tuple[FileEntry, ...]) -> bool:
        """Whether who decided before did so, and died before it could say so."""
        manifest = self._staging.published()
        return manifest is not None and set(files) <= set(manifest.files)

    def _metadata(self, posts: list[Post]) -> bytes:
        global _last_metadata
        parts = []
        for post in posts:
            table = self._peers.peek(post.table)
            assert table is not None, "a rank posts its table before it posts what it wrote"
            parts.append((table, post.objects))
        made_of, data = _last_metadata
        if made_of != (parts, self._mappings):  # else it is as it was in the save before, and most are
            data = _make_metadata(parts, self._mappings)
            _last_metadata = (parts, self._mappings), data
        return data


def _make_metadata(parts: list[_Part], mappings: dict[str, Any]) -> bytes:
    places: dict[MetadataIndex, tuple[str, int, int]] = {}
    entries: list[Entry] = []
    names: list[str] = []
    for data, objects in parts:
        table = Table.from_bytes(data)
        entries += table.entries
        for entry, place in zip(table.entries, table.places, strict=True):
            places[index_of(entry)] = (table.file_name, *place)
        for name, begin, length in objects:
            names.append(name)
            places[MetadataIndex(name)] = (table.file_name, begin, length)
    return pickle.dumps(make_metadata(describe(entries, names), places, mappings))


def _verdict(reason: str, *, because_of_death: bool = False, in_doubt: bool = False) -> bytes:
    return json.dumps({"reason": reason, "because_of_death": because_of_death, "in_doubt": in_doubt}).encode()


def tell_os_error(error: BaseException) -> str:
    """Return what failed, in lower case, for the middle of a sentence."""
    if isinstance(error, StoreUnreachableError):
        return f"{error.reason}: {error.path}"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror[:1].lower() + error.strerror[1:]
        return f"{text}: {error.filename}" if error.filename else text
    return f"{type(error).__name__}: {error}"


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _pauses() -> Iterator[None]:
    """Come at once, then after longer and longer pauses."""
    pause = _SHORTEST_PAUSE
    while True:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
