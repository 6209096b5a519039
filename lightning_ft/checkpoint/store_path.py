"""Where checkpoints lie: in a directory of a file system, or in a store that fsspec knows, such as ``s3://bucket/run``."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_ft.errors import StoreUnreachableError

_LOCAL = ("file", "local")
_BLOCK = 8 << 20


class StoreStatus(NamedTuple):
    """What is known about a file of a store; named as ``os.stat`` names it.

    Args:
        st_size: Its length in bytes.
        st_mtime: When it was written, in seconds since 1970; 0 if the store does not say.

    """

    st_size: int
    st_mtime: float


class StorePath:
    """A path in a store, with what checkpoints need of pathlib's ``Path``.

    Stores have no directories: one is there while files are that begin with its path. What was written is there as a whole,
    or what was there before. Errors but a missing file are :class:`StoreUnreachableError`, because they say nothing about
    what is there.

    Args:
        url: The address.

    """

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self._protocol = protocol
        self._rest = rest.rstrip("/")

    def __str__(self) -> str:
        return f"{self._protocol}://{self._rest}"

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self}/{name}") if name else self

    @property
    def name(self) -> str:
        return posixpath.basename(self._rest)

    @property
    def parent(self) -> StorePath:
        return StorePath(f"{self._protocol}://{posixpath.dirname(self._rest)}") if "/" in self._rest else self

    @cached_property
    def _in_store(self) -> tuple[Any, str]:
        try:
            return cast(tuple[Any, str], url_to_fs(str(self)))
        except ImportError as error:  # it says which package is missing
            raise StoreUnreachableError(str(self), f"{error} (for s3: pip install 'lightning-ft[s3]')") from error

    @contextmanager
    def _asking(self) -> Iterator[tuple[Any, str]]:
        try:
            yield self._in_store
        except (FileNotFoundError, StoreUnreachableError):
            raise
        except Exception as error:  # each store has its own
            raise StoreUnreachableError(str(self), _told(error)) from error

    def _info(self) -> dict[str, Any]:
        with self._asking() as (store, path):
            store.invalidate_cache()  # what others wrote meanwhile
            return cast(dict[str, Any], store.info(path))

    # Looking.

    def exists(self) -> bool:
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        try:
            return bool(self._info()["type"] == "directory")
        except FileNotFoundError:
            return False

    def stat(self) -> StoreStatus:
        return _status(self._info())

    def entries(self) -> list[StoreEntry]:
        """Return what lies directly in it, by name.

        Raises:
            FileNotFoundError: If there is nothing.

        """
        with self._asking() as (store, path):
            store.invalidate_cache()
            listed = store.ls(path, detail=True)
        found = {posixpath.basename(info["name"].rstrip("/")): info for info in listed}
        found = {name: info for name, info in found.items() if info["name"].rstrip("/").strip("/") != path.strip("/")}
        return [StoreEntry(self / name, info["type"] == "directory", _status(info)) for name, info in sorted(found.items())]

    def num_bytes(self) -> int:
        """Return the size of all files in it, or of itself."""
        with self._asking() as (store, path):
            store.invalidate_cache()
            return int(store.du(path))

    # Reading.

    def read_bytes(self) -> bytes:
        with self._asking() as (store, path):
            return cast(bytes, store.cat_file(path))

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """Open it for reading from the front to the back; going back costs another request."""
        assert mode == "rb"
        with self._asking() as (store, path):
            file = store.open(path, "rb", block_size=_BLOCK, cache_type="readahead")
            return cast(BinaryIO, _Reading(file, str(self)))

    # Changing.

    def write_bytes(self, data: bytes) -> None:
        try:
            with self._asking() as (store, path):
                store.pipe_file(path, data)
        except FileNotFoundError as error:  # the bucket
            raise StoreUnreachableError(str(self), _told(error)) from error

    def copy_from(self, source: StorePath) -> None:
        """Have the store copy another of its files here."""
        with self._asking() as (store, path):
            store.cp_file(source._in_store[1], path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._asking() as (store, path):
                store.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove it with all that is in it, if it is there."""
        try:
            with self._asking() as (store, path):
                store.invalidate_cache()
                store.rm(path, recursive=True)
        except FileNotFoundError:
            pass


@dataclass(frozen=True)
class StoreEntry:
    """What lies in a path of a store.

    Args:
        path: Where.
        is_directory: Whether there are files below it.
        status: Of a file.

    """

    path: StorePath
    is_directory: bool
    status: StoreStatus


class _Reading(io.RawIOBase):
    """A file of a store, whose errors are told as those of its path are."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._file.readinto(buffer))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise StoreUnreachableError(self._path, _told(error)) from error

    def close(self) -> None:
        self._file.close()
        super().close()


Place: TypeAlias = Path | StorePath


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the address of something else than a file system."""
    protocol, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and protocol not in _LOCAL


def local_form(path: str | os.PathLike[str]) -> str:
    """Return a path as it is but for a ``file://`` before it."""
    protocol, separator, rest = os.fspath(path).partition("://")
    return rest if separator and protocol in _LOCAL else os.fspath(path)


def place(path: str | os.PathLike[str]) -> Place:
    """Return where that is; paths of the file system become absolute."""
    if isinstance(path, StorePath):
        return path
    return StorePath(os.fspath(path)) if is_store(path) else Path(local_form(path)).absolute()


def relative_to(path: Place, start: Place) -> str | None:
    """Return how to come from the directory ``start`` to ``path``; None if there is no way, because stores differ."""
    if isinstance(path, StorePath) or isinstance(start, StorePath):
        alike = isinstance(path, StorePath) and isinstance(start, StorePath) and path._protocol == start._protocol
        return posixpath.relpath(f"/{path._rest}", f"/{start._rest}") if alike else None  # type: ignore[union-attr]
    return os.path.relpath(path, start)


def follow(start: Place, relative: str) -> Place:
    """Return where one comes to from a directory, see :func:`relative_to`."""
    if isinstance(start, StorePath):
        return StorePath(f"{start._protocol}://{posixpath.normpath(f'/{start._rest}/{relative}').lstrip('/')}")
    return Path(os.path.normpath(start / relative))


def _status(info: dict[str, Any]) -> StoreStatus:
    times = (info.get(name) for name in ("LastModified", "mtime", "updated", "last_modified", "created"))
    told = next((time for time in times if time is not None), 0.0)
    return StoreStatus(int(info.get("size") or 0), float(told.timestamp() if hasattr(told, "timestamp") else told))


def _told(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
