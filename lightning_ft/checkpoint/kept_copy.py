"""A checkpoint of a store in a local directory, made of what was read to verify it, so that it is not read again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lightning_ft.checkpoint.layout import MANIFEST, Manifest
from lightning_ft.checkpoint.temporary_copies import hold, make_directory


class _Ranks(Protocol):
    @property
    def rank(self) -> int: ...
    def broadcast(self, value: str) -> str: ...
    def first_problem(self, problem: str | None) -> str | None: ...


class KeptCopy:
    """A directory that all ranks of one machine fill and read together.

    There is no copy where there is no room for it, or ranks are on several machines.

    Args:
        ranks: Which.

    """

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks
        self._directory: Path | None = None
        self._release: Callable[[], None] = lambda: None
        self._is_whole = False

    @property
    def directory(self) -> Path | None:
        """Where the checkpoint is that was verified last, if all of it is there."""
        return self._directory if self._is_whole else None

    def begin(self) -> None:
        """Collective. Forget what there is, for another checkpoint."""
        self.close()
        made = make_directory() if self._ranks.rank == 0 else ""
        self._directory = Path(self._ranks.broadcast(made))
        self._release = hold(self._directory)

    def has_room(self, manifest: Manifest) -> bool:
        """Whether there is room, and as much again for others."""
        assert self._directory is not None
        with suppress(OSError):  # it is on another machine
            return shutil.disk_usage(self._directory).free > 2 * manifest.num_bytes
        return False

    def receiver(self, name: str) -> Callable[[memoryview], None]:
        """Return what takes a file, block by block. If it can't be written, it stays too short, and nothing is raised."""
        assert self._directory is not None
        path, mode = self._directory / name, "wb"

        def take(block: memoryview) -> None:
            nonlocal mode
            with suppress(OSError):
                if mode:
                    how, mode = mode, ""
                    with open(path, how) as file:
                        file.write(block)
                    mode = "ab"

        return take

    def finish(self, manifest: Manifest | None) -> None:
        """Collective. Find out whether all of it is there, for all ranks."""
        is_whole = manifest is not None and all(self._size(entry.path) == entry.size for entry in manifest.files)
        self._is_whole = self._ranks.first_problem(None if is_whole else "it is not whole") is None
        if self._is_whole and self._ranks.rank == 0:
            assert self._directory is not None
            assert manifest is not None
            (self._directory / MANIFEST).write_bytes(replace(manifest, data="").to_bytes())

    def close(self) -> None:
        """Remove it. May be called twice."""
        self._is_whole = False
        if self._directory is not None and self._ranks.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self._release()
        self._release = lambda: None

    def _size(self, name: str) -> int:
        assert self._directory is not None
        with suppress(OSError):
            return (self._directory / name).stat().st_size
        return -1
