"""Where dumps lie, and what says that one is whole.

``<directory>/<role>/<phase>/rollout_<id>/attempt_<n>/`` holds what was dumped of a rollout by ranks that began an attempt
together: ``attempt.json`` says what it is, and each of them writes a part: its tensors, one behind another, an index with a
line for each, and at last a marker. For readers an attempt exists once the markers of all its parts are there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ATTEMPT = "attempt.json"
_STAGING_PREFIX = ".begun-"
_NUMBER = re.compile(r"attempt_(\d+)")
_NAME = re.compile(r"[\w.@+=-]*\w[\w.@+=-]*")


@dataclass(frozen=True)
class Attempt:
    """What is known of an attempt from its beginning.

    Args:
        role: Which model it is of.
        phase: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        rollout: Id of the rollout.
        run_id: The run that wrote it.
        num_parts: How many ranks write.
        created: When it began, in seconds since 1970.

    """

    role: str
    phase: str
    rollout: int
    run_id: str
    num_parts: int
    created: float


@dataclass(frozen=True)
class Marker:
    """Says that a part is whole.

    Args:
        num_entries: Tensors in it.
        index_size: Bytes of the index.
        index_xxh3: XXH3-64 of the index, in hexadecimal.
        tensors_size: Bytes of the tensors.
        steps: The first and the last step in it, or None if it is empty.

    """

    num_entries: int
    index_size: int
    index_xxh3: str
    tensors_size: int
    steps: tuple[int, int] | None


def check_name(call: str, name: str, value: object) -> None:
    """Raise ValueError unless ``value`` can be the name of a directory."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"`{call}({name}={value!r})` is not valid: expected letters, digits and any of . _ @ + = -")


def tensors_file(part: int) -> str:
    """Return the name of the file with the tensors of a part."""
    return f"part_{part:05d}.tensors"


def index_file(part: int) -> str:
    """Return the name of the index of a part."""
    return f"part_{part:05d}.jsonl"


def marker_file(part: int) -> str:
    """Return the name of the file that says that a part is whole."""
    return f"part_{part:05d}.complete.json"


def rollout_directory(dirpath: str | os.PathLike[str], role: str, phase: str, rollout: int) -> Path:
    """Return where the attempts of a rollout lie."""
    return Path(dirpath) / role / phase / f"rollout_{rollout}"


def attempt_number(path: str | os.PathLike[str]) -> int | None:
    """Return the number of the attempt that has this path; None if it is none."""
    match = _NUMBER.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def begin_attempt(dirpath: str | os.PathLike[str], attempt: Attempt) -> Path:
    """Make the directory of a new attempt, which nobody else gets, and return its path."""
    parent = rollout_directory(dirpath, attempt.role, attempt.phase, attempt.rollout)
    staging = parent / f"{_STAGING_PREFIX}{secrets.token_hex(8)}"
    while not staging.exists():
        with suppress(FileNotFoundError):  # another process cleans up, and takes the parent away before this is in it
            staging.mkdir(parents=True)
    write_whole(staging / ATTEMPT, asdict(attempt))
    number = max((n for name in os.listdir(parent) if (n := attempt_number(name)) is not None), default=0)
    while True:
        number += 1
        path = parent / f"attempt_{number}"
        try:
            os.rename(staging, path)
        except OSError as error:  # that of another process, which is never empty
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return path


def read_attempt(path: str | os.PathLike[str]) -> Attempt | None:
    """Return what is known of the attempt at ``path``; None if there is none."""
    fields = _read(Path(path) / ATTEMPT)
    return None if fields is None else Attempt(**fields)


def read_marker(path: str | os.PathLike[str], part: int) -> Marker | None:
    """Return the marker of a part; None if it is not whole."""
    fields = _read(Path(path) / marker_file(part))
    if fields is None:
        return None
    steps = fields.pop("steps")
    return Marker(**fields, steps=None if steps is None else (steps[0], steps[1]))


def write_whole(path: Path, fields: dict[str, Any]) -> None:
    """Write a small file that is there whole or not at all, whatever dies."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return dict(fields)
