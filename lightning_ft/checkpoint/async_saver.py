"""Saves in the background: the training goes on while the state is copied, written and committed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from lightning_ft.checkpoint.commit import Commit, Post, Table, tell_os_error
from lightning_ft.checkpoint.image import Image, pickled
from lightning_ft.checkpoint.layout import FileEntry, Manifest, staging_name
from lightning_ft.checkpoint.leftovers import claim, discard
from lightning_ft.checkpoint.peers import Peers, Roll
from lightning_ft.checkpoint.plan import Flat, Seat, divide, is_record, local
from lightning_ft.checkpoint.snapshot import Snapshot
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.checkpoint.writer_process import sync_directory, write_file

log = logging.getLogger(__name__)

_KEPT_ON_THE_BOARD = 8
"""Saves whose posts stay in the store after they are settled, for ranks that have not read them yet."""


@dataclass(frozen=True)
class Content:
    """What is to be saved.

    Args:
        state: Nested dicts and lists of tensors and small objects, for torch's distributed checkpoint.
        files: Returns further files of the rank that has a seat.
        manifest: Without what only the saver knows.

    """

    state: dict[str, Any]
    files: Callable[[Seat], dict[str, bytes]]
    manifest: Manifest


class PendingSave:
    """A save under way.

    Args:
        target: The directory that it becomes.
        step: Whose state it is.
        is_twin: Whether it shares files with an earlier one.

    """

    def __init__(self, target: Path, step: int, *, is_twin: bool = False) -> None:
        self.target = target
        self.step = step
        self.is_twin = is_twin
        self.error: BaseException | None = None
        """Why it did not become a checkpoint; only to be looked at once it is :attr:`done`."""
        self.write_seconds = 0.0
        """How long writing took in this rank."""
        self.stall_seconds = 0.0
        """How long the training of this rank was kept waiting for it."""
        self.copied = threading.Event()
        self.post = Post()
        """What this rank wrote."""
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it is a checkpoint, or failed."""
        return self._settled.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once it is a checkpoint.

        Raises:
            TimeoutError: If it takes longer than ``timeout``.
            CheckpointNotCommittedError: If it failed.

        """
        if not self._settled.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"Checkpoint {self.target} was not committed within {timeout}; it is still being saved.")
        if self.error is not None:
            raise self.error

    def then(self, action: Callable[[], None]) -> None:
        """Have something done once this is a checkpoint: in its thread, or now if it is one already."""
        with self._lock:
            if not self.done:
                self._then.append(action)
                return
        if self.error is None:
            action()

    def settle(self, error: BaseException | None) -> None:
        """Say how it ended."""
        with self._lock:
            self.error = error
            actions = self._then if error is None else []
            self.copied.set()
            for action in actions:
                action()
            self._settled.set()


class AsyncSaver:
    """Saves the state of one rank, together with its peers.

    Args:
        peers: The ranks that save together.
        timeout: When a save is given up that a rank has not written by then.
        max_pending: How many saves may be under way: so many copies of this rank's share are held in memory.
        on_settled: Called in a thread once a save succeeded or failed.

    """

    def __init__(
        self,
        peers: Peers,
        *,
        timeout: timedelta = timedelta(minutes=30),
        max_pending: int = 1,
        on_settled: Callable[[PendingSave], None] = lambda save: None,
    ) -> None:
        self.writer = Writer()
        self.stall_seconds = 0.0
        """How long the training was kept waiting so far."""
        self._peers = peers
        self._timeout = timeout
        self._max_pending = max_pending
        self._on_settled = on_settled
        self._pending: deque[PendingSave] = deque()
        self._images: list[tuple[Any, Image]] = []
        self._num_images = 0
        self._posted_tables: set[str] = set()
        self._commits: deque[Commit] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves under way, oldest first."""
        return tuple(save for save in self._pending if not save.done)

    def save(
        self,
        target: str | os.PathLike[str],
        content: Content,
        *,
        replaces: Iterable[Path] = (),
        may_change: Callable[[str, Tensor], bool] = lambda name, tensor: True,
        twin_of: PendingSave | None = None,
    ) -> PendingSave:
        """Collective. Begin to save; wait first if there are too many under way.

        Args:
            target: The directory that it becomes.
            content: What to save. What does not change before the next optimizer step is read until then, see
                :meth:`wait_for_copy`.
            replaces: Checkpoints that go once this one is there.
            may_change: Whether a tensor, by its name in ``content.state``, may change in forward and backward passes, and
                so differ between ranks that hold it: it is copied at once, and saved as the first rank has it.
            twin_of: An earlier save of the same state, on all ranks alike: the tensors' files are shared with it.

        """
        if twin_of is None:
            self.wait_for_copy()
        started = time.monotonic()
        if twin_of is None:
            while len(pending := [save for save in self.pending if not save.is_twin]) >= self._max_pending:
                with suppress(Exception):  # told by `on_settled`
                    pending[0].wait()
        previous = self._pending[-1] if self._pending else None
        roll = self._peers.enroll()
        save = PendingSave(Path(target), content.manifest.step, is_twin=twin_of is not None)
        self._pending = deque([*self.pending, save])
        task = _Task(self, save, previous, roll, content, tuple(replaces), twin_of)
        if twin_of is None:
            task.prepare(may_change)
        threading.Thread(target=task.run, name="lightning_ft-save", daemon=True).start()
        taken = time.monotonic() - started
        save.stall_seconds += taken
        self.stall_seconds += taken
        return save

    def wait_for_copy(self) -> None:
        """Return once what is being saved may change."""
        if self._pending and not self._pending[-1].copied.is_set():
            started = time.monotonic()
            self._pending[-1].copied.wait()
            taken = time.monotonic() - started
            self._pending[-1].stall_seconds += taken
            self.stall_seconds += taken

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once nothing is being saved any more; how it ended each save says.

        Raises:
            TimeoutError: If it takes longer than ``timeout``.

        """
        for save in self.pending:
            try:
                save.wait(timeout)
            except TimeoutError:
                raise
            except Exception:  # told by `on_settled`
                log.debug("%s failed", save.target, exc_info=True)

    def close(self) -> None:
        """End the writer process, and with an error what is still being saved. May be called twice."""
        self._closed = True
        self.writer.close()
        for save in self._pending:
            save._settled.wait(5.0)
        with self._lock:
            for _, image in self._images:
                image.close()
            self._images.clear()

    # Images.

    def take_image(self, key: Any, make: Callable[[str], Image]) -> Image:
        """Return memory that nobody uses, laid out as ``key`` says."""
        with self._lock:
            stale = [image for known, image in self._images if known != key]
            free = [image for known, image in self._images if known == key]
            self._images = [(key, image) for image in free[1:]]
            self._num_images += 1
        for image in stale:
            self.writer.forget(image)
            image.close()
        return free[0] if free else make(f"image-{self._num_images}")

    def give_back(self, key: Any, image: Image) -> None:
        """Let the next save use the memory."""
        with self._lock:
            if not self._closed:
                self._images.append((key, image))
                return
        image.close()


class _Task:
    """What one save does: prepare on the training thread, the rest on its own."""

    def __init__(
        self,
        saver: AsyncSaver,
        save: PendingSave,
        previous: PendingSave | None,
        roll: Roll,
        content: Content,
        replaces: Collection[Path],
        twin_of: PendingSave | None,
    ) -> None:
        self._saver = saver
        self._save = save
        self._previous = previous
        self._roll = roll
        names = tuple(path.name for path in replaces if path.parent == save.target.parent)
        self._manifest = replace(content.manifest, world_size=roll.seat.world_size, replaces=names)
        self._content: Content | None = content
        self._replaces = replaces
        self._twin_of = twin_of
        self._staging = save.target.with_name(staging_name(save.target.name, roll.token))
        self._flat = Flat.of(content.state)
        self._key: Any = None
        self._image: Image | None = None
        self._snapshot: Snapshot | None = None
        self._objects: tuple[tuple[str, int, int], ...] = ()
        self._failure: str | None = None

    def prepare(self, may_change: Callable[[str, Tensor], bool]) -> None:
        """Copy what may change at any time; a failure is told to the peers later, who wait for this rank."""
        assert self._content is not None
        leaves, seat = self._flat.leaves, self._roll.seat
        objects = {name: leaf for name, leaf in leaves.items() if not is_record(leaf)}
        try:
            blobs = pickled(objects.items()) if seat.rank == 0 else {}
            differing = frozenset(name for name, leaf in leaves.items() if is_record(leaf) and may_change(name, leaf))
            self._key = (seat, differing, self._flat.signature())
            self._image = image = self._saver.take_image(self._key, partial(self._make_image, differing))
            places = image.fill_tail(blobs, self._content.files(seat))
            self._objects = tuple((name, *place) for name, place in places.items())
            pairs = [
                (entry.name, destination, local(leaves[entry.name]))
                for entry, destination in zip(image.entries, image.destinations, strict=True)
            ]
            now = [pair for pair in pairs if pair[0] in differing]
            self._snapshot = Snapshot(now, [pair for pair in pairs if pair[0] not in differing])
        except Exception as error:
            self._failure = tell_os_error(error)
        self._content = None

    def _make_image(self, differing: Collection[str], name: str) -> Image:
        seat = self._roll.seat
        return Image(divide(self._flat, seat, differing), f"__{seat.rank}_0.distcp", name)

    def run(self) -> None:
        """Copy, write and commit."""
        error: BaseException | None = None
        lease = None
        try:
            post = Post(error=self._failure)
            if self._failure is None:
                try:
                    post, lease = self._write() if self._twin_of is None else self._link(self._twin_of)
                except Exception as failure:
                    post = Post(error=tell_os_error(failure))
            self._save.copied.set()
            self._save.post = post
            self._commit(post)
        except BaseException as failure:
            error = failure
        finally:
            if lease is not None:
                os.close(lease)
            if self._image is not None:
                self._saver.give_back(self._key, self._image)
            self._save.settle(error)
            self._saver._on_settled(self._save)

    def _write(self) -> tuple[Post, int]:
        assert self._image is not None
        assert self._snapshot is not None
        self._snapshot.finish()
        self._snapshot = None
        self._flat = Flat({}, self._flat.mappings)
        self._save.copied.set()
        if self._previous is not None:
            self._previous._settled.wait()
        os.makedirs(self._staging, exist_ok=True)
        lease = claim(self._staging)
        written = self._saver.writer.write(str(self._staging), self._image)
        self._save.write_seconds = written.seconds
        files = tuple(FileEntry(file["path"], file["size"], file["xxh3"]) for file in written.files)
        return Post(files, self._post_table(self._image), self._objects), lease

    def _link(self, other: PendingSave) -> tuple[Post, int]:
        """Share the tensors' file with a save of the same state."""
        self._save.copied.set()
        other.wait()
        os.makedirs(self._staging, exist_ok=True)
        lease = claim(self._staging)
        assert self._content is not None
        own = self._content.files(self._roll.seat)
        entries = []
        for entry in other.post.files:
            path = self._staging / entry.path
            if entry.path in own:
                written = write_file(str(path), memoryview(own[entry.path]))
                entry = FileEntry(entry.path, written["size"], written["xxh3"])
            else:
                os.link(other.target / entry.path, path)
            entries.append(entry)
        sync_directory(str(self._staging))
        return replace(other.post, files=tuple(entries)), lease

    def _post_table(self, image: Image) -> str:
        table = Table(f"__{self._roll.seat.rank}_0.distcp", image.entries, tuple(image.places)).to_bytes()
        key = f"table/{xxhash.xxh3_64_hexdigest(table)}"
        if key not in self._saver._posted_tables:
            self._saver._peers.post(key, table)
            self._saver._posted_tables.add(key)
        return key

    def _commit(self, post: Post) -> None:
        saver = self._saver
        commit = Commit(
            saver._peers,
            self._roll,
            self._staging,
            self._save.target,
            self._manifest,
            self._flat.mappings,
            saver._timeout,
        )
        with saver._lock:
            saver._commits.append(commit)
            old = saver._commits.popleft() if len(saver._commits) > _KEPT_ON_THE_BOARD + saver._max_pending else None
        if old is not None:
            old.forget()
        if commit.settle(post, lambda: saver._closed):
            for path in self._replaces:
                _remove(path)


def _remove(path: Path) -> None:
    try:
        discard(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("The old checkpoint %s could not be removed (%s).", path, error)
