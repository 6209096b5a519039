"""What a checkpoint directory holds: its names, and the manifest that says what its files must be.

A directory ``<dirpath>/<name>`` is a checkpoint once it holds a manifest; in a file system it gets that name, by a rename,
only then. Beside the manifest, in a store in the directory that it names, lie a distributed checkpoint of torch
(``.metadata`` and ``*.distcp``), ``meta.pt`` with everything that is not a large tensor, and one section for each rank.
Lightning's own ``ModelParallelStrategy`` reads the first two as its own.
"""

import json
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import torch
import xxhash

from lightning_ft.errors import MalformedStateError

MANIFEST = "manifest.json"
METADATA = ".metadata"
META = "meta.pt"
STAGING_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
DATA_PREFIX = ".data-"
CLAIM_PREFIX = ".claim-"
HIDDEN_PREFIXES = (STAGING_PREFIX, TRASH_PREFIX, DATA_PREFIX)
"""What begins so is no checkpoint."""

_FORMAT = 1
_CHECKSUM = "checksum"
_HEX = re.compile(r"[0-9a-f]{16}")


def staging_name(name: str, token: str) -> str:
    """Return the name under which checkpoint ``name`` is written.

    Args:
        name: The name that it gets once it is whole.
        token: The same on all ranks and another one in each attempt, which keeps out writers of a dead process.

    """
    return f"{STAGING_PREFIX}{name}-{token}"


def data_name(token: str) -> str:
    """Return the name of the directory in a checkpoint's that has its files, where nothing can be renamed."""
    return f"{DATA_PREFIX}{token}"


def trash_name(name: str) -> str:
    """Return a new name under which a directory is no checkpoint any more, until it is removed."""
    return f"{TRASH_PREFIX}{name}-{secrets.token_hex(4)}"


def rank_section_name(rank: int) -> str:
    """Return the name of the file with what only this rank had."""
    return f"rank-{rank:05d}.state"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Args:
        path: Where it lies in the directory, with ``/``.
        size: Its length in bytes.
        xxh3: XXH3-64 of its content, in hexadecimal.

    """

    path: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint that was committed.

    Args:
        step: Optimizer steps completed.
        epoch: Epochs completed.
        run_id: The run that wrote it.
        world_size: Ranks of that run.
        shard_size: Ranks that held one copy of the model together.
        files: All files but the manifest itself.
        created: When it was committed, in seconds since 1970.
        replaces: Checkpoints that are removed once this one is there, as paths from the directory that it is in. The next
            start finishes a removal that was cut off.
        parent: The checkpoint that the run was resumed from.
        data: The directory beside the manifest that has the files; empty: they are beside it themselves.
        versions: Of what wrote it.

    """

    step: int
    epoch: int
    run_id: str
    world_size: int
    shard_size: int
    files: tuple[FileEntry, ...]
    created: float = 0.0
    replaces: tuple[str, ...] = ()
    parent: str | None = None
    data: str = ""
    versions: Mapping[str, str] = field(default_factory=_versions)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    def to_bytes(self) -> bytes:
        """Return the manifest's file, with a checksum of itself."""
        fields = {"format": _FORMAT, **asdict(replace(self, versions=dict(self.versions)))}
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1, sort_keys=True).encode("ascii") + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read what :meth:`to_bytes` made.

        Raises:
            MalformedStateError: If it is anything else.

        """
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MalformedStateError(f"{MANIFEST} of {len(data)} bytes is not JSON ({error})") from error
        if not isinstance(fields, dict) or _checksum(fields) != fields.pop(_CHECKSUM, None):
            raise MalformedStateError(f"{MANIFEST} does not match its own checksum")
        if fields.pop("format", None) != _FORMAT:
            raise MalformedStateError(f"{MANIFEST} is of another format than {_FORMAT}, which this version reads")
        try:
            manifest = cls(**{**fields, "files": tuple(_entry(entry) for entry in fields["files"])})
        except (TypeError, KeyError) as error:
            raise MalformedStateError(f"{MANIFEST} has other fields than a manifest ({error})") from error
        if manifest.data and not (manifest.data.startswith(DATA_PREFIX) and "/" not in manifest.data):
            raise MalformedStateError(f"{MANIFEST} has the files in {manifest.data!r}, which is no directory for them")
        return replace(manifest, replaces=tuple(_replaced(path) for path in manifest.replaces))


def _checksum(fields: dict[str, Any]) -> str:
    rest = {name: value for name, value in fields.items() if name != _CHECKSUM}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, separators=(",", ":"), sort_keys=True).encode("ascii"))


def _entry(fields: dict[str, Any]) -> FileEntry:
    entry = FileEntry(**fields)
    path = PurePosixPath(entry.path)
    if path.is_absolute() or ".." in path.parts or entry.path in ("", ".", MANIFEST):
        raise MalformedStateError(f"{MANIFEST} lists {entry.path!r}, which is no file of this checkpoint")
    if type(entry.size) is not int or entry.size < 0 or not _HEX.fullmatch(entry.xxh3):
        raise MalformedStateError(f"{MANIFEST} has no size and checksum of {entry.path!r}")
    return entry


def _replaced(path: str) -> str:
    """Whoever removes it looks where that leads."""
    if PurePosixPath(path).is_absolute() or PurePosixPath(path).name in ("", ".."):
        raise MalformedStateError(f"{MANIFEST} replaces {path!r}, which is no path from one checkpoint to another")
    return path
