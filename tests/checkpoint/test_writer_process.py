import mmap
import os
from datetime import timedelta
from pathlib import Path

import pytest
import xxhash

from lightning_ft.checkpoint.image import Image
from lightning_ft.checkpoint.verify import checksum
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.checkpoint.writer_process import DIRECT_ALIGNMENT, write_file


def takes_direct(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "size", [0, 1, DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT + 7, (8 << 20) + DIRECT_ALIGNMENT, (16 << 20) + 1]
)
@pytest.mark.parametrize("start", [0, 8])
def test_a_file_is_what_the_memory_holds_whether_or_not_it_goes_past_the_page_cache(
    size: int, start: int, tmp_path: Path
) -> None:
    memory = mmap.mmap(-1, start + max(size, 1))
    memory[:] = os.urandom(len(memory))
    path = tmp_path / "file"
    path.write_bytes(b"longer than what comes" * 4096)
    with memoryview(memory) as view:
        written = write_file(str(path), view[start : start + size])
    assert path.read_bytes() == memory[start : start + size]
    assert written["size"] == size
    assert written["xxh3"] == checksum(path) == xxhash.xxh3_64_hexdigest(memory[start : start + size])
    # Memory that begins at no page is what the file system takes the flag for, and then not the write.
    assert written["direct"] == (start == 0 and size >= DIRECT_ALIGNMENT and takes_direct(tmp_path))


def test_the_process_that_writes_stands_back_for_those_that_train(tmp_path: Path) -> None:
    writer, image = Writer(), Image([], "file", "image")
    image.fill_tail({"object": b"content"}, {})
    try:
        writer.write(str(tmp_path / "saved"), image, timedelta(minutes=1))
        assert (tmp_path / "saved" / "file").read_bytes() == b"content"
        assert writer.pid is not None
        assert os.sched_getscheduler(writer.pid) == os.SCHED_BATCH
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, writer.pid) == min(19, own + 15)
    finally:
        writer.close()
        image.close()
