"""The commands ``lightning-ft ckpt ls | verify | export | rm``."""

import argparse
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial

from lightning_ft.checkpoint.export import export_checkpoint, export_safetensors
from lightning_ft.checkpoint.layout import MANIFEST, METADATA
from lightning_ft.checkpoint.leftovers import discard
from lightning_ft.checkpoint.reader import Candidate, candidates, places
from lightning_ft.checkpoint.store_path import StorePath, place, relative_to
from lightning_ft.checkpoint.verify import verify
from lightning_ft.errors import DamagedCheckpointError, StoreUnreachableError

_DEPTH = 2


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the commands to ``lightning-ft ckpt``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("ls", help="list checkpoints, the newest first")
    listing.add_argument("dirpath", nargs="?", default=".", help="directory that holds checkpoints, or s3://...")
    listing.set_defaults(run=lambda arguments: _or_exit(lambda: _list(arguments.dirpath)))

    verifying = commands.add_parser("verify", help="check every byte; exit code 1 if anything is damaged")
    verifying.add_argument("path", nargs="+", help="a checkpoint, or a directory that holds some")
    verifying.add_argument("--sizes", action="store_true", help="read small files only, and compare lengths of the others")
    verifying.set_defaults(run=lambda arguments: _or_exit(lambda: _verify(arguments.path, arguments.sizes)))

    exporting = commands.add_parser("export", help="make a single file of a checkpoint's directory")
    exporting.add_argument("checkpoint")
    exporting.add_argument("out", help="the file; an existing one is replaced")
    exporting.add_argument("--safetensors", action="store_true", help="weights and buffers only, as safetensors")
    exporting.add_argument("--trust", action="store_true", help="load objects too, such as classes in hyperparameters")
    exporting.set_defaults(run=lambda arguments: _export(arguments))

    removing = commands.add_parser("rm", help="remove checkpoints; a kill in between leaves no half of one")
    removing.add_argument("checkpoint", nargs="+")
    removing.set_defaults(run=lambda arguments: _remove(arguments.checkpoint))


def _list(dirpath: str) -> None:
    where = place(dirpath)
    if not where.is_dir():
        sys.exit(f"{dirpath} is no directory.")
    found = _found(dirpath)
    rows: list[tuple[str, ...]] = [("NAME", "STEP", "EPOCH", "RANKS", "MB", "SAVED", "")]
    for candidate in found:
        name = relative_to(place(candidate.path), where) or candidate.path
        saved = datetime.fromtimestamp(candidate.created).isoformat(" ", "seconds")
        try:
            manifest = verify(candidate.path, "sizes")
        except DamagedCheckpointError as error:
            rows.append((name, "", "", "", "", saved, f"damaged: {error.reason}"))
            continue
        if manifest is None:
            rows.append((name, "", "", "", f"{_size(candidate.path) / 1e6:.1f}", saved, "no manifest"))
            continue
        numbers = (str(number) for number in (manifest.step, manifest.epoch, manifest.world_size))
        rows.append((name, *numbers, f"{manifest.num_bytes / 1e6:.1f}", saved, ""))
    if not found:
        print(f"There is no checkpoint in {dirpath}.")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _found(dirpath: str) -> list[Candidate]:
    """Return the checkpoints in a directory and a little below it: metrics whose names have a ``/`` make directories."""
    inside = [candidate for place in places(dirpath, _DEPTH) for candidate in candidates(place)]
    return sorted(inside, key=lambda candidate: -candidate.created)


def _size(checkpoint: str) -> int:
    path = place(checkpoint)
    if isinstance(path, StorePath):
        return path.num_bytes()
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _verify(paths: Iterable[str], sizes: bool) -> None:
    num_damaged = 0
    for path in paths:
        inside = [candidate.path for candidate in _found(path)] if _holds_checkpoints(path) else []
        for checkpoint in inside or [path]:
            try:
                manifest = verify(checkpoint, "sizes" if sizes else "full")
            except DamagedCheckpointError as error:
                num_damaged += 1
                print(f"{checkpoint}: damaged: {error.reason}")
            else:
                how = "intact" if manifest is not None else "no manifest; intact as far as can be told without"
                print(f"{checkpoint}: {how}")
    if num_damaged:
        sys.exit(1)


def _holds_checkpoints(path: str) -> bool:
    where = place(path)
    return where.is_dir() and not any((where / name).exists() for name in (MANIFEST, METADATA))


def _export(arguments: argparse.Namespace) -> None:
    def export() -> None:
        if not arguments.safetensors:
            export_checkpoint(arguments.checkpoint, arguments.out, weights_only=not arguments.trust)
            return
        for name in export_safetensors(arguments.checkpoint, arguments.out):
            print(f"Left out {name}: it is no tensor.", file=sys.stderr)

    _or_exit(export)
    print(f"{arguments.out}: {os.path.getsize(arguments.out) / 1e6:.1f} MB")


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        if not _is_checkpoint(path):
            sys.exit(f"{path} is no checkpoint. Nothing was removed.")
    for path in paths:
        _or_exit(partial(discard, path))


def _is_checkpoint(path: str) -> bool:
    where = place(path)
    beside = {candidate.path for candidate in candidates(where.parent)}
    if isinstance(where, StorePath):
        return str(where) in beside
    return os.path.realpath(where) in {os.path.realpath(candidate) for candidate in beside}


def _or_exit(action: Callable[[], None]) -> None:
    """Do it, or end with one line that says why not."""
    try:
        action()
    except ModuleNotFoundError as error:
        sys.exit(f"`--safetensors` needs the package {error.name}: pip install {error.name}")
    except pickle.UnpicklingError as error:
        sys.exit(f"{str(error).splitlines()[0]} On the command line that is --trust.")
    except (DamagedCheckpointError, StoreUnreachableError, OSError) as error:
        sys.exit(str(error))
