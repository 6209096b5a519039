"""The writing of a part: what is written is what was there at the moment, within the memory that it may take."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ft.dump.background import Background
from lightning_ft.dump.index import Moment
from lightning_ft.dump.layout import Attempt, begin_attempt
from lightning_ft.dump.reader import FoundAttempt, find_attempts, read_records
from lightning_ft.dump.writer import PartWriter
from lightning_ft.errors import DumpError

MOMENT = Moment(3, 0)


def begin(directory: Path, run_id: str = "run", **fields: Any) -> Path:
    given = {"role": "model", "phase": "train", "rollout": 0, "run_id": run_id, "num_parts": 1, "created": 1.0, **fields}
    return begin_attempt(directory, Attempt(**given))


def write(
    directory: Path, tensors: dict[str, Tensor], *, max_bytes: int = 1000, finish: bool = True, **options: Any
) -> Path:
    path = begin(directory, **options.pop("attempt", {}))
    background = Background(max_bytes := 1000)
    writer = PartWriter(path, 0, background, **options)
    for name, tensor in tensors.items():
        writer.put(MOMENT, f"value:{name}", tensor)
    if finish:
        writer.finish()
    writer.close()
    background.close()
    assert background.peak_bytes <= max_bytes
    return path


def read(directory: Path) -> dict[str, Tensor]:
    return {key.name.removeprefix("value:"): record.load()[0] for key, record in read_records(directory).items()}


def test_tensors_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "plain": numbers,
        "not contiguous": numbers.permute(2, 0, 1)[1:, :, ::2],
        "expanded": torch.ones(1).expand(5, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bfloat16": numbers.bfloat16(),
        "float8": numbers.to(torch.float8_e4m3fn),
        "bool": numbers > 3,
        "int": torch.tensor([2**62, -1]),
        "complex": torch.complex(numbers, -numbers),
        "conjugate": torch.complex(numbers, -numbers).conj(),
        "negative": torch.complex(numbers, -numbers).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "requires grad": torch.nn.Parameter(numbers.clone()),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    write(tmp_path, tensors)
    written = read(tmp_path)
    assert list(written) == list(tensors)
    for name, tensor in tensors.items():
        expected = tensor.to_dense() if tensor.is_sparse else tensor.detach()
        assert written[name].dtype == expected.dtype
        assert written[name].shape == expected.shape
        same = torch.equal(written[name].float(), expected.float()) if name == "float8" else None
        assert same or torch.equal(written[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name


def test_what_has_no_values_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write(tmp_path, {"meta": torch.empty(2, device="meta"), "plain": torch.ones(2)})
    assert list(read(tmp_path)) == ["plain"]
    assert "`value:meta` is not dumped: it is a meta tensor." in caplog.text


def test_floating_point_tensors_are_written_as_asked(tmp_path: Path) -> None:
    write(tmp_path, {"float": torch.tensor([1 / 3]), "int": torch.tensor([3])}, dtype=torch.bfloat16)
    written = read(tmp_path)
    assert written["float"].dtype == torch.bfloat16
    assert written["int"].dtype == torch.int64
    (record, _) = read_records(tmp_path).values()
    assert record.entries[0].was == "float32"


def test_waiting_copies_take_no_more_than_they_may_and_show_the_moment(tmp_path: Path) -> None:
    """The storage stands still until the training has to wait for it."""
    may_write, is_waiting = threading.Event(), threading.Event()
    max_bytes = 4 * 100
    background = Background(max_bytes)

    def slow(descriptor: int, data: memoryview) -> int:
        assert may_write.wait(60)
        return os.write(descriptor, data[:150])  # and it takes less than it is given

    path = begin(tmp_path)
    writer = PartWriter(path, 0, background, write=slow)
    tensor = torch.zeros(30)
    large = torch.arange(7 * 90.0).reshape(7, 2, 45).transpose(1, 2)

    def train() -> None:
        for step in range(20):
            writer.put(Moment(step, 0), "value:x", tensor)
            tensor.add_(1.0)
            if step == 2:
                is_waiting.set()
        writer.put(Moment(20, 0), "value:large", large)
        writer.finish()

    thread = threading.Thread(target=train)
    thread.start()
    assert is_waiting.wait(60)
    may_write.set()
    thread.join(60)
    background.close()
    assert 0 < background.peak_bytes <= max_bytes
    *small, last = read_records(tmp_path).values()
    assert [float(record.load()[0][0]) for record in small] == list(range(20))
    assert torch.equal(last.load()[0], large)


def test_a_full_disk_costs_the_attempt_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        if os.fstat(descriptor).st_size > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)

    with caplog.at_level(logging.WARNING):
        path = write(tmp_path, {str(n): torch.ones(20) for n in range(9)}, write=full)
    assert caplog.text.count("is given up: [Errno 28] No space left on device. The training goes on.") == 1
    (found,) = find_attempts(path)
    assert not found.is_complete
    with pytest.raises(DumpError, match="none of the 1 attempts in it is whole"):
        read_records(tmp_path)


def test_storage_that_stalls_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def stalled(descriptor: int, data: memoryview) -> int:
        assert go_on.wait(60)
        return os.write(descriptor, data)

    background = Background(80, patience=0.2)
    writer = PartWriter(begin(tmp_path), 0, background, write=stalled)
    for _ in range(3):
        writer.put(MOMENT, "value:x", torch.ones(20))
    writer.finish()
    writer.close()
    assert "is given up: the storage stalls. The training goes on." in caplog.text
    go_on.set()
    background.close()
    (found,) = find_attempts(tmp_path)
    assert not found.is_complete


def test_attempts_are_numbered_and_what_a_later_one_has_counts(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, attempt={"created": 1.0})
    write(tmp_path, {"b": torch.ones(1)}, attempt={"created": 2.0})
    write(tmp_path, {"b": 2 * torch.ones(1)}, attempt={"created": 3.0}, finish=False)
    assert [found.number for found in find_attempts(tmp_path)] == [1, 2, 3]
    assert {name: float(tensor) for name, tensor in read(tmp_path).items()} == {"a": 0.0, "b": 1.0}
    write(tmp_path, {"c": torch.ones(1)}, attempt={"created": 4.0, "run_id": "another"})
    assert list(read(tmp_path)) == ["c"], "what another run left of the rollout does not belong to it"
    assert list(read(tmp_path / "model" / "train" / "rollout_0" / "attempt_1")) == ["a", "b"]


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("part_00000.tensors", lambda data: data[:-1], "part_00000.tensors is cut off"),
        (
            "part_00000.tensors",
            lambda data: data[:5] + b"\xff" + data[6:],
            "`value:x` in step 3 does not match its checksum",
        ),
        ("part_00000.jsonl", lambda data: data[:-9], "part_00000.jsonl does not match its checksum"),
        ("part_00000.jsonl", lambda data: data.replace(b"x", b"y", 1), "part_00000.jsonl does not match its checksum"),
    ],
)
def test_what_was_damaged_is_found(tmp_path: Path, name: str, change: Callable[[bytes], bytes], reason: str) -> None:
    path = write(tmp_path, {"x": torch.arange(10.0)})
    damage(path / name, change)
    found: FoundAttempt
    (found,) = find_attempts(tmp_path)
    with pytest.raises(DumpError, match=reason):
        found.verify()


def test_without_its_marker_an_attempt_does_not_exist_for_readers(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": torch.arange(10.0)}, attempt={"num_parts": 2})
    (found,) = find_attempts(path)
    assert not found.is_complete, "the other rank's part is missing"
