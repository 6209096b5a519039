"""Writes one part of an attempt in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from lightning_ft.dump.background import Background
from lightning_ft.dump.index import Entry, Moment
from lightning_ft.dump.layout import Marker, index_file, marker_file, tensors_file, write_whole
from lightning_ft.dump.tensors import copied, dtype_name, num_bytes, pieces, whole

log = logging.getLogger(__name__)

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class PartWriter:
    """One part of an attempt.

    What fails (a full disk, storage that stalls) is told once, costs the attempt, and never the training.

    Args:
        attempt: Directory of the attempt.
        part: Which part of it.
        background: Where it writes.
        dtype: What floating-point tensors are written as; None: as they are.
        write: Writes to a file descriptor, as ``os.write`` does.

    """

    def __init__(
        self,
        attempt: Path,
        part: int,
        background: Background,
        *,
        dtype: torch.dtype | None = None,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        self.attempt = attempt
        self.part = part
        self.error: BaseException | None = None
        self._background = background
        self._dtype = dtype
        self._write = write
        self._order = threading.Lock()
        self._descriptors: list[int] = []
        self._sizes = [0, 0]
        self._num_entries = 0
        self._index_xxh3, self._tensor_xxh3 = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._steps: tuple[int, int] | None = None
        self._is_closed = False
        self._submit(self._open)

    def put(self, moment: Moment, name: str, tensor: Tensor, call: int = 0) -> None:
        """Write ``tensor`` as it is now. Returns once it was copied; collective in its mesh if it is sharded.

        Args:
            moment: Where the training is.
            name: Its name.
            tensor: Of any kind that has values in memory.
            call: How often the same was written at this moment before.

        """
        try:
            tensor = whole(tensor)
        except TypeError as error:
            log.warning("`%s` is not dumped: it is %s.", name, error)
            return
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        size, was = num_bytes(tensor, dtype), dtype_name(tensor.dtype)
        with self._order:  # backward passes run in other threads
            for piece in pieces(tensor, self._background.max_bytes // dtype.itemsize):
                if self.error is not None or self._is_closed:
                    return
                piece_size = num_bytes(piece, dtype)
                if not self._background.reserve(piece_size):
                    self._fail(TimeoutError("the storage stalls"))
                    return
                self._submit(self._writing(copied(piece, dtype)), piece_size)
            fields = (name, moment.step, moment.micro_batch, moment.loader, call, self.part, tuple(tensor.shape))
            kind = dtype_name(dtype)
            self._submit(lambda: self._write_entry((*fields, kind, "" if was == kind else was), size))

    def finish(self) -> None:
        """Have the part marked as whole once all is written that was put so far; more may follow, and be marked again."""
        self._submit(self._mark)

    def close(self) -> None:
        """Write nothing from now on but what was put already. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._background.submit(self._close)

    def _submit(self, task: Callable[[], None], size: int = 0) -> None:
        def guarded() -> None:
            if self.error is None:
                try:
                    task()
                except Exception as error:
                    self._fail(error)

        self._background.submit(guarded, size)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            log.warning("The dump in %s is given up: %s. The training goes on.", self.attempt, error)

    # In the background.

    def _open(self) -> None:
        for name in (tensors_file(self.part), index_file(self.part)):
            self._descriptors.append(os.open(self.attempt / name, _FLAGS, 0o666))

    def _close(self) -> None:
        while self._descriptors:
            with suppress(OSError):  # of what could not be written, which `fsync` told
                os.close(self._descriptors.pop())

    def _writing(self, data: memoryview) -> Callable[[], None]:
        def write() -> None:
            self._tensor_xxh3.update(data)
            self._write_all(0, data)

        return write

    def _write_all(self, which: int, data: memoryview) -> None:
        while data:
            written = self._write(self._descriptors[which], data)
            self._sizes[which] += written
            data = data[written:]

    def _write_entry(self, fields: tuple[str, int, int, int, int, int, tuple[int, ...], str, str], size: int) -> None:
        place = (tensors_file(self.part), self._sizes[0] - size, size, self._tensor_xxh3.hexdigest())
        self._tensor_xxh3.reset()
        line = Entry(*fields, *place).to_line()
        self._write_all(1, memoryview(line))
        self._index_xxh3.update(line)
        self._num_entries += 1
        first, last = self._steps or (fields[1], fields[1])
        self._steps = min(first, fields[1]), max(last, fields[1])

    def _mark(self) -> None:
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        tensors_size, index_size = self._sizes
        marker = Marker(self._num_entries, index_size, self._index_xxh3.hexdigest(), tensors_size, self._steps)
        write_whole(self.attempt / marker_file(self.part), asdict(marker))
