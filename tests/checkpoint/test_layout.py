import json
from dataclasses import replace

import pytest

from lightning_ft.checkpoint.layout import FileEntry, Manifest
from lightning_ft.errors import MalformedStateError

MANIFEST = Manifest(
    step=7,
    epoch=1,
    run_id="run",
    world_size=4,
    shard_size=2,
    files=(FileEntry("__0_0.distcp", 10, "0" * 16), FileEntry("more/meta.pt", 3, "f" * 16)),
    created=1.5,
    replaces=("step=3.ckpt", "../val/loss=0.5.ckpt"),
    parent="/elsewhere/step=0.ckpt",
)


def test_manifest_survives_the_trip_through_its_file() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = MANIFEST.to_bytes()
    for position in range(0, len(data) - 1, 3):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        try:
            unchanged = Manifest.from_bytes(bytes(flipped))
        except MalformedStateError:
            continue
        assert unchanged == MANIFEST  # the bit was in the layout of the JSON


def test_a_manifest_cut_off_anywhere_is_noticed() -> None:
    data = MANIFEST.to_bytes().rstrip()
    for length in range(len(data)):
        with pytest.raises(MalformedStateError, match=r"manifest\.json"):
            Manifest.from_bytes(data[:length])


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "", "a/../../b", "manifest.json"])
def test_a_manifest_names_only_files_of_its_own_directory(path: str) -> None:
    data = replace(MANIFEST, files=(FileEntry(path, 0, "0" * 16),)).to_bytes()
    with pytest.raises(MalformedStateError, match="no file of this checkpoint"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("path", ["/other", "a/..", "", ".."])
def test_a_manifest_replaces_only_what_it_finds_from_where_it_is(path: str) -> None:
    with pytest.raises(MalformedStateError, match="no path from one checkpoint to another"):
        Manifest.from_bytes(replace(MANIFEST, replaces=(path,)).to_bytes())


def test_a_manifest_of_a_later_format_is_not_guessed_at() -> None:
    from lightning_ft.checkpoint.layout import _checksum

    fields = {**json.loads(MANIFEST.to_bytes()), "format": 2}
    fields["checksum"] = _checksum(fields)
    with pytest.raises(MalformedStateError, match="another format"):
        Manifest.from_bytes(json.dumps(fields).encode())
