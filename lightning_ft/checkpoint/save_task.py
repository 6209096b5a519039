"""What one save does: it prepares on the training thread, and does the rest on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_ft.checkpoint.commit import Commit, Post, Table, tell_os_error
from lightning_ft.checkpoint.image import Image, pickled
from lightning_ft.checkpoint.image_pool import ImagePool
from lightning_ft.checkpoint.layout import FileEntry
from lightning_ft.checkpoint.leftovers import discard
from lightning_ft.checkpoint.peers import Peers, Roll
from lightning_ft.checkpoint.pending_save import Content, PendingSave
from lightning_ft.checkpoint.plan import Flat, divide, is_record, local
from lightning_ft.checkpoint.snapshot import Snapshot
from lightning_ft.checkpoint.staging import staging_of
from lightning_ft.checkpoint.store_path import Place
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import CheckpointNotCommittedError, StoreUnreachableError

log = logging.getLogger(__name__)


@dataclass
class Means:
    """What the saves of one saver share.

    Args:
        peers: The ranks that save together.
        writer: Writes.
        images: Memory.
        timeout: When a save is given up that says nothing else.
        on_settled: Called when a save succeeded or failed.

    """

    peers: Peers
    writer: Writer
    images: ImagePool
    timeout: timedelta
    on_settled: Callable[[PendingSave], None]
    posted_tables: set[str] = field(default_factory=set)
    closed: bool = False
    _failed: dict[Place, tuple[Place, ...]] = field(default_factory=dict)
    """What saves that failed were to replace."""

    def goes_with(self, replaces: tuple[Place, ...]) -> tuple[Place, ...]:
        """Return which checkpoints go with these: those too that one of them was to replace, had it not failed."""
        return tuple(dict.fromkeys(one for path in replaces for one in (path, *self._failed.get(path, ()))))

    def note(self, save: PendingSave) -> None:
        """Remember how a save ended."""
        self._failed.pop(save.target, None)
        if save.error is not None:
            self._failed[save.target] = save.replaces


class SaveTask:
    """One save of one rank.

    Args:
        means: What it is done with.
        save: What whoever asked for it sees.
        roll: Who takes part.
        content: What to save.
        timeout: When it is given up.

    """

    def __init__(self, means: Means, save: PendingSave, roll: Roll, content: Content, timeout: timedelta) -> None:
        self._means = means
        self._save = save
        self._seat = roll.seat
        self._timeout = timeout
        self._agreed = content.agreed
        self._staging = staging_of(save.target, roll.token, timeout)
        save.content = self._staging.content
        self._flat = Flat.of(content.state)
        manifest = replace(content.manifest, world_size=roll.seat.world_size)
        self._commit = Commit(means.peers, roll, self._staging, manifest, self._flat.mappings, timeout)
        self._key: Any = None
        self._image: Image | None = None
        self._write: Callable[[], Post]
        self._leave: Callable[[], None] = lambda: None

    # On the training thread.

    @torch.no_grad()  # a DTensor gives its local part at once then
    def prepare(self, content: Content, may_change: Callable[[str, Tensor], bool], previous: PendingSave | None) -> None:
        """Copy what may change at any time.

        A failure is told to the peers later, by :meth:`run`: they wait for this rank.

        Args:
            content: What to save.
            may_change: Whether a tensor may change before the next optimizer step.
            previous: The save to be written before.

        """
        leaves = self._flat.leaves
        try:
            objects = {name: leaf for name, leaf in leaves.items() if not is_record(leaf)} if self._seat.rank == 0 else {}
            blobs = pickled(objects.items())
            differing = frozenset(name for name, leaf in leaves.items() if is_record(leaf) and may_change(name, leaf))
            self._key = (self._seat, differing, self._flat.signature())
            self._image = image = self._means.images.take(self._key, partial(self._make_image, differing))
            places = image.fill_tail(blobs, content.files(self._seat))
            rows = tuple((name, *place) for name, place in places.items())
            pairs = [
                (entry.name, destination, local(leaves[entry.name]))
                for entry, destination in zip(image.entries, image.destinations, strict=True)
            ]
            now = [pair for pair in pairs if pair[0] in differing]
            snapshot = Snapshot(now, [pair for pair in pairs if pair[0] not in differing])
        except Exception as error:
            self._write = partial(_fail, error)
        else:
            self._write = partial(self._write_image, image, snapshot, rows, previous)
        self._flat = Flat({}, {})

    def prepare_twin(self, content: Content, other: PendingSave) -> None:
        """Prepare to share the tensors' file with an earlier save of the same state."""
        self._flat = Flat({}, {})
        self._save.copied.set()
        self._write = partial(self._link, other, content.files(self._seat))

    def _make_image(self, differing: Collection[str], name: str) -> Image:
        return Image(divide(self._flat, self._seat, differing), self._file_name, name)

    @property
    def _file_name(self) -> str:
        return f"__{self._seat.rank}_0.distcp"

    # On a thread of its own.

    def run(self, old: SaveTask | None = None) -> None:
        """Copy, write and commit; remove what ``old`` posted, which asks the store and waits for it."""
        error: BaseException | None = None
        try:
            try:
                self._save.post = self._write()
            except CheckpointNotCommittedError:  # that this one was to share files with, as all ranks know
                raise
            except Exception as failure:
                self._save.post = Post(error=tell_os_error(failure))
            self._save.copied.set()
            self._save.replaces = self._means.goes_with(self._save.replaces)  # of earlier saves it is known by now
            post = replace(self._save.post, agreed=self._agreed)
            if self._commit.settle(post, self._save.replaces, lambda: self._means.closed):
                for path in self._save.replaces:
                    _remove(path)
        except BaseException as failure:
            error = failure
        finally:
            self._finish(error)
        if old is not None:
            old.forget()

    def _finish(self, error: BaseException | None) -> None:
        self._leave()
        if self._image is not None:
            self._means.images.give_back(self._key, self._image)
        self._save.error = error
        self._means.note(self._save)
        try:
            self._means.on_settled(self._save)
        finally:
            self._save.settle(self._save.error)

    def forget(self) -> None:
        """Remove what this rank posted: all ranks are through with it."""
        self._commit.forget()

    def _write_image(
        self, image: Image, snapshot: Snapshot, objects: tuple[tuple[str, int, int], ...], previous: PendingSave | None
    ) -> Post:
        checksum = snapshot.finish(image.checksum())
        self._save.copied.set()
        if previous is not None:
            with suppress(Exception):
                previous.wait()
        self._leave = self._staging.enter()
        known = {} if checksum is None else {self._file_name: checksum}
        written = self._means.writer.write(str(self._staging.directory), image, self._timeout, known)
        self._save.write_seconds = written.seconds
        files = tuple(FileEntry(file["path"], file["size"], file["xxh3"]) for file in written.files)
        return Post(files, self._post_table(image), objects)

    def _link(self, other: PendingSave, own_files: dict[str, bytes]) -> Post:
        other.wait()
        self._leave = self._staging.enter()
        entries = []
        for entry in other.post.files:
            if entry.path in own_files:
                entry = self._staging.write(entry.path, own_files[entry.path])
            else:
                self._staging.share(other.content, entry.path)
            entries.append(entry)
        self._staging.sync()
        return replace(other.post, files=tuple(entries))

    def _post_table(self, image: Image) -> str:
        table = Table(self._file_name, image.entries, tuple(image.places)).to_bytes()
        key = f"table/{xxhash.xxh3_64_hexdigest(table)}"
        if key not in self._means.posted_tables:
            self._means.peers.post(key, table)
            self._means.posted_tables.add(key)
        return key


def _fail(error: Exception) -> Post:
    raise error


def _remove(path: Place) -> None:
    try:
        discard(path)
    except FileNotFoundError:
        pass
    except (OSError, StoreUnreachableError) as error:
        log.warning("The old checkpoint %s could not be removed (%s).", path, error)
