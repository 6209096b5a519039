import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from lightning_ft.elastic.exchange import INLINE_BYTES, PendingExchange, check_headers, pack_header
from lightning_ft.errors import CollectiveMismatchError, GroupBrokenError


def header(sequence: int = 3, size: int = 16, label: str = "mean", inline: bytes = b"") -> bytes:
    return pack_header(sequence, size, label, inline).numpy().tobytes()


def test_equal_headers_yield_the_payload_of_each_rank() -> None:
    assert check_headers([header(inline=b"a"), header(inline=b""), header(inline=b"ccc")]) == [b"a", b"", b"ccc"]


def test_a_payload_that_fills_the_header_arrives_whole() -> None:
    inline = bytes(range(INLINE_BYTES))
    assert check_headers([header(inline=inline)]) == [inline]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (header(sequence=4), r"mean \(operation 4, 16 bytes\)"),
        (header(size=24), r"mean \(operation 3, 24 bytes\)"),
        (header(label="barrier:x", size=0), r"barrier:x \(operation 3\)"),
    ],
)
def test_different_headers_are_an_error_that_names_both_operations(other: bytes, named: str) -> None:
    expected = rf"ranks 0, 2 entered mean \(operation 3, 16 bytes\), rank 1 entered {named}"
    with pytest.raises(CollectiveMismatchError, match=expected):
        check_headers([header(), other, header()])


def test_a_long_label_is_cut_and_stays_readable() -> None:
    label = "barrier:" + "x" * 100
    with pytest.raises(CollectiveMismatchError, match="barrier:xxx"):
        check_headers([header(label=label), header()])


def test_a_process_alone_exchanges_with_itself() -> None:
    pending = PendingExchange(None, 0, 1, pack_header(0, 0, "mean", b"xyz"))
    assert pending.ready
    exchange = pending.wait()
    tensor = torch.tensor([1.0, 2.0])
    exchange.all_reduce(tensor)
    exchange.broadcast(tensor, 0)
    assert exchange.inline == [b"xyz"]
    assert tensor.tolist() == [1.0, 2.0]
    assert exchange.all_gather(tensor)[0].tolist() == [1.0, 2.0]
    assert pending.wait() is exchange


class BrokenGroup(ProcessGroupGloo):
    def allgather(self, *args: object) -> None:  # type: ignore[override]
        raise GroupBrokenError("the peer is gone")


def test_a_group_that_broke_before_is_reported_where_it_is_waited_for() -> None:
    pending = PendingExchange(BrokenGroup(HashStore(), 0, 1), 0, 1, pack_header(0, 0, "mean", b""))
    assert pending.ready
    for _ in range(2):
        with pytest.raises(GroupBrokenError, match="the peer is gone"):
            pending.wait()
