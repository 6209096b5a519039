import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import xxhash

from lightning_ft.checkpoint.image import Image
from lightning_ft.checkpoint.plan import Flat, Seat, divide
from lightning_ft.checkpoint.snapshot import Snapshot
from lightning_ft.checkpoint.verify import checksum
from lightning_ft.checkpoint.writer import Writer

MB = 1 << 20


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().flatten().contiguous().view(torch.uint8)


@pytest.mark.parametrize("objects", [{}, {"epoch": b"3", "lr": b"0.1"}])
def test_the_checksum_taken_while_copying_is_that_of_the_file_whatever_tensors_are_in_it(
    objects: dict[str, bytes], tmp_path: Path
) -> None:
    state = {
        "whole pieces": torch.randn(MB // 2),
        "a piece and a value": torch.randn(MB // 8 + 1),
        "transposed": torch.randn(700, 301).t(),
        "part": torch.randn(2 * MB)[1::2],
        "expanded": torch.randn(1, 300_000).expand(2, -1),
        "conjugate": torch.randn(100_000, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bool": torch.rand(MB) > 0.5,
        "float8": torch.randn(MB).to(torch.float8_e4m3fn),
        "changes in forward": torch.randn(200_001),
    }
    writer, image = Writer(), Image(divide(Flat.of(state), Seat(0, 1)), "__0_0.distcp", "image")
    try:
        for again in range(2):
            image.fill_tail(objects, {"meta.pt": b"of this rank"})
            pairs = [
                (entry.name, to, state[entry.name]) for entry, to in zip(image.entries, image.destinations, strict=True)
            ]
            now = [pair for pair in pairs if pair[0] == "changes in forward"]
            taken = Snapshot(now, [pair for pair in pairs if pair[0] != "changes in forward"]).finish(image.checksum())
            written = writer.write(str(tmp_path / f"{again}"), image, timedelta(minutes=1), {"__0_0.distcp": taken})
            for file in written.files:
                assert file["xxh3"] == checksum(tmp_path / f"{again}" / file["path"])
            for _, destination, source in pairs:
                assert torch.equal(as_bytes(destination), as_bytes(source))
            state["whole pieces"] += 1
    finally:
        writer.close()
        image.close()


def test_a_file_without_tensors_has_a_checksum_and_no_file_has_none() -> None:
    image = Image([], "__0_0.distcp", "image")
    assert image.checksum() is None
    image.fill_tail({"epoch": b"3"}, {})
    assert Snapshot([], []).finish(image.checksum()) == xxhash.xxh3_64_hexdigest(b"3")
    image.close()


def test_a_checksum_that_is_known_is_not_taken_again(tmp_path: Path) -> None:
    image, writer = Image([], "file", "image"), Writer()
    image.fill_tail({"object": os.urandom(100)}, {"other": b"file"})
    try:
        files = writer.write(str(tmp_path), image, timedelta(minutes=1), {"file": "from the trainer"}).files
        assert [file["xxh3"] for file in files] == ["from the trainer", xxhash.xxh3_64_hexdigest(b"file")]
    finally:
        writer.close()
        image.close()
