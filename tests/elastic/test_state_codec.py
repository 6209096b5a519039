import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ft.elastic.state_codec import allocate, decode, encode
from lightning_ft.errors import MalformedStateError, UnsupportedStateError


def send(state: Any, **options: Any) -> Any:
    """What arrives at the other side, in memory of its own."""
    encoded = encode(state)
    received = allocate(encoded.header)
    for target, source in zip(received, encoded.storages, strict=True):
        target.copy_(source)
    return decode(encoded.header, received, **options)


def bits(tensor: Tensor) -> Tensor:
    content = tensor.detach().resolve_conj().reshape(-1)
    return content.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(first: Any, second: Any) -> None:
    """Equal including types, order and the bits of every number."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
        assert first.requires_grad == second.requires_grad
        assert torch.equal(bits(first), bits(second))
    elif isinstance(first, np.ndarray | np.generic):
        assert (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())
    elif isinstance(first, float):
        assert struct.pack("d", first) == struct.pack("d", second)
    elif isinstance(first, complex):
        assert_same([first.real, first.imag], [second.real, second.imag])
    elif isinstance(first, dict):
        assert_same(list(first.items()), list(second.items()))
    elif isinstance(first, list | tuple | deque):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


numbers = st.one_of(st.booleans(), st.integers(), st.floats(), st.complex_numbers())
moments = st.one_of(
    st.dates(),
    st.times(timezones=st.none() | st.just(timezone.utc)),
    st.datetimes(timezones=st.none() | st.just(timezone(timedelta(hours=-3, minutes=7)))),
    st.timedeltas(),
)
atoms = st.one_of(
    st.none(),
    numbers,
    st.text(),
    st.text(st.characters(categories=["Cs"])),  # surrogates, as in file names that are not UTF-8
    st.binary(),
    moments,
    st.builds(slice, st.integers(), st.none(), st.integers()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 4)),
)
hashables = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), moments),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    integers = [torch.bool, torch.uint8, torch.int16, torch.int64]
    dtypes = [*integers, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(dtypes)))
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.is_floating_point() and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


states = st.recursive(
    atoms | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3])),
        st.sets(hashables, max_size=3),
    ),
    max_leaves=12,
)


@given(states)
def test_what_arrives_is_what_was_sent(state: Any) -> None:
    assert_same(send(state), state)


class Mood:
    class Color(Enum):
        RED = 1
        ALIAS = 1


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
        complex(math.nan, -0.0),
        2**63 - 1,
        2**63,
        -(2**70000),
        "a\U0001f600",
        "\ud83d\ude00",
        Counter("aab"),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {1: 2}),
        deque([1, 2], maxlen=2),
        frozenset({1, (2, "x")}),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.qint8,
        torch.device("cuda", 1),
        Path("/x/y"),
        PurePosixPath("a"),
        PureWindowsPath("c:\\a"),
        date(2000, 2, 29),
        time(1, 2, 3, 4, fold=1),
        datetime(2000, 1, 1, fold=1, tzinfo=timezone.utc),
        np.float32(0.1),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.complex128(1 + 2j),
        np.datetime64("2020-01-01", "ns"),
        np.arange(6).reshape(2, 3).T,
        np.array(3.5, dtype=">f8"),
        np.zeros((0, 3), dtype=np.float16),
        np.array(["abc", "d"]),
        np.array([b"abc", b"d"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.random.RandomState(3).get_state(),
        torch.get_rng_state(),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(1).expand(1000),
        {1: "int", 1.5: "float", None: "none", (1, (2,)): "tuple", b"x": "bytes"},
        OrderedDict(b=1, a=2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_arrives_with_its_type_and_bits(value: Any) -> None:
    assert_same(send([value])[0], value)


def test_nan_with_payload_keeps_its_bits_in_tensors() -> None:
    tensor = torch.tensor([0x7FC00001, -0x400001, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(send(tensor).view(torch.int32), tensor.view(torch.int32))


def test_an_enum_arrives_as_the_member_that_is_there() -> None:
    assert send(Mood.Color.ALIAS) is Mood.Color.RED


def test_views_share_their_memory_again_and_it_is_sent_once() -> None:
    base = torch.arange(100.0)
    rows = base[20:40].view(4, 5)
    state = {"tied": base, "rows": rows, "columns": rows.t(), "bits": base.view(torch.int32)}
    assert [storage.numel() for storage in encode(state).storages] == [400]
    received = send(state)
    received["tied"][21] = -1.0
    assert received["rows"][0, 1] == -1.0
    assert received["columns"][1, 0] == -1.0
    assert received["bits"][21] == torch.tensor(-1.0).view(torch.int32)


def test_a_small_view_of_a_huge_memory_sends_only_what_it_needs() -> None:
    base = torch.arange(1_000_000.0)
    encoded = encode([base[500_001:500_011], base[500_020]])
    assert sum(storage.numel() for storage in encoded.storages) <= 4 * 20 + 16
    assert_same(send(base[500_001:500_011]), base[500_001:500_011])


def test_views_of_different_types_share_a_memory_that_begins_in_the_middle_of_an_element() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    state = {"bytes": base[17:19], "floats": base[20:28].view(torch.float32)}
    assert_same(send(state), state)
    assert len(encode(state).storages) == 1


def test_storages_are_the_memory_of_the_tensors_not_copies() -> None:
    tensor = torch.zeros(4)
    storage = encode({"a": tensor}).storages[0]
    tensor.fill_(1.0)
    assert torch.equal(storage.view(torch.float32), torch.ones(4))


def test_tensors_go_to_the_map_location() -> None:
    received = send({"a": torch.ones(3), "b": torch.zeros(0)}, map_location="meta")
    assert received["a"].device.type == "meta"
    assert received["b"].device.type == "meta"


def test_storages_at_odd_addresses_are_accepted() -> None:
    encoded = encode(torch.arange(3.0, dtype=torch.float64))
    odd = torch.empty(25, dtype=torch.uint8)[1:]
    odd.copy_(encoded.storages[0])
    assert torch.equal(decode(encoded.header, [odd]), torch.arange(3.0, dtype=torch.float64))


Pair = namedtuple("Pair", "a b")


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (Plain(), r"`callbacks\['Mine'\]\['obj'\]`.*Plain.*state_dict"),
        (Pair(1, 2), "Pair"),
        (lambda: 0, "function"),
        (torch.nn.Linear(1, 1), "Linear"),
        (bytearray(1), "bytearray"),
        (defaultdict(lambda: 0), "factory"),
        (np.array([object()]), "ndarray"),
        (np.zeros(1, dtype=[("a", "i4")]), "ndarray"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (2,), check_invariants=True), "torch.sparse_coo"),
        (torch.zeros(1, device="meta"), "meta device"),
        (Enum("Local", "A").A, "Local"),  # type: ignore[attr-defined]
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unsupported_value_is_named_with_its_place(value: Any, match: str) -> None:
    with pytest.raises(UnsupportedStateError, match=match):
        encode({"callbacks": {"Mine": {"obj": value}}})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_refused_because_its_scale_is_not_in_its_memory() -> None:
    with pytest.raises(UnsupportedStateError, match=r"a tensor of type torch\.qint8"):
        encode(torch.quantize_per_tensor(torch.zeros(1), 0.1, 0, torch.qint8))


def test_a_place_inside_of_lists_is_written_like_the_expression_that_reads_it() -> None:
    with pytest.raises(UnsupportedStateError, match=r"`state\[1\]\['x'\]\[0\]`"):
        encode([0, {"x": (Plain(),)}])


def test_skipping_leaves_out_the_nearest_dict_entry_and_its_memory() -> None:
    state = {"a": 1, "b": {"good": torch.ones(1), "bad": [torch.zeros(1000), Plain()]}, ("k",): {Plain(): 1}}
    encoded = encode(state, on_unsupported="skip")
    assert encoded.skipped[0] == "b['bad']"
    assert len(encoded.skipped) == 2
    assert len(encoded.storages) == 1
    assert_same(decode(encoded.header, encoded.storages), {"a": 1, "b": {"good": torch.ones(1)}, ("k",): {}})


def test_skipping_raises_when_there_is_no_dict_entry_to_leave_out() -> None:
    with pytest.raises(UnsupportedStateError, match="Plain"):
        encode([Plain()], on_unsupported="skip")


def test_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": [1]}
    state["a"].append(state)
    with pytest.raises(UnsupportedStateError, match=r"`a\[1\]`.*contains itself"):
        encode(state)


def test_state_nested_too_deeply_is_refused() -> None:
    state: list[Any] = []
    for _ in range(5000):
        state = [state]
    with pytest.raises(UnsupportedStateError, match="nested deeper than 100 levels"):
        encode(state)


def test_the_same_list_at_two_places_is_no_cycle() -> None:
    shared = [1]
    assert send([shared, shared, [shared]]) == [[1], [1], [[1]]]


def header(root: Any, storages: Any = (), **changes: Any) -> bytes:
    return json.dumps({"format": "lightning_ft.state/1", "storages": list(storages), "root": root, **changes}).encode()


def view(index: Any = 0, offset: Any = 0, dtype: Any = "float32", size: Any = (2,), stride: Any = (1,)) -> list[Any]:
    return ["tensor", [index, offset, dtype, size, stride, False, False]]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not JSON"),
        (b"\xff\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not of format"),
        (header(1, format="other/1"), "not of format"),
        (json.dumps({"format": "lightning_ft.state/1", "storages": []}).encode(), "not of format"),
        (header(1, storages=[-1]), "storage sizes"),
        (header(1, storages=["8"]), "storage sizes"),
        (header(1, storages=[8, 8]), "expected uint8 storages"),
        (header({"a": 1}, [8]), "bare JSON object"),
        (header([], [8]), "unknown type None"),
        (header([["list"]], [8]), "unhashable|unknown type"),
        (header(["object", 1], [8]), "unknown type 'object'"),
        (header(["dict", 1], [8]), "ValueError"),
        (header(["dict", ["list"], 1], [8]), "unhashable"),
        (header(["defaultdict", "eval"], [8]), "eval"),
        (header(["Enum", "os", "system", "x"], [8]), "not an Enum"),
        (header(["Enum", "not_imported_anywhere", "A", "x"], [8]), "not an Enum"),
        (header(["Path", "eval", "x"], [8]), "eval"),
        (header(["bytes", "!!"], [8]), "binascii|Error"),
        (header(["float", "00"], [8]), "error"),
        (header(["int", "zz"], [8]), "ValueError"),
        (header(["dtype", "load"], [8]), "load"),
        (header(["array", "|O", 1, view(dtype="uint8", size=[8])], [8]), "not a plain NumPy type"),
        (header(["array", "<f8", 9, view(dtype="uint8", size=[8])], [8]), "reshape"),
        (header(["tensor"], [8]), "IndexError"),
        (header(view(size=[3]), [8]), "ends at byte 12 of a storage of 8"),
        (header(view(offset=1), [8]), "ends at byte 12"),
        (header(view(offset=-1), [8]), "offset -1"),
        (header(view(stride=[-1]), [8]), "stride"),
        (header(view(stride=[2**62]), [8]), "ends at byte"),
        (header(view(size=[2, 2]), [8]), "stride"),
        (header(view(size=[True]), [8]), "size"),
        (header(view(size=None), [8]), "TypeError"),
        (header(view(index=1), [8]), "storage 1 of 1"),
        (header(view(index=-1), [8]), "storage -1 of 1"),
        (header(view(index=None), [8]), "view of storage None"),
        (header(view(dtype="qint8"), [8]), "unknown type 'qint8'"),
        (header(["tensor", [0, 0, "int32", [2], [1], True, False]], [8]), "RuntimeError"),
    ],
)
def test_a_malformed_header_ends_in_a_clear_error(content: bytes, match: str) -> None:
    with pytest.raises(MalformedStateError, match=match):
        decode(content, [torch.zeros(8, dtype=torch.uint8)])


@given(states, st.data())
def test_a_truncated_header_ends_in_a_clear_error(state: Any, data: st.DataObject) -> None:
    encoded = encode({"state": state})
    length = data.draw(st.integers(0, len(encoded.header) - 1))
    with pytest.raises(MalformedStateError, match="not JSON"):
        allocate(encoded.header[:length])


@given(states, st.data())
def test_a_damaged_header_never_ends_in_another_error(state: Any, data: st.DataObject) -> None:
    encoded = encode({"state": state})
    damaged = bytearray(encoded.header)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(32, 126))
    with contextlib.suppress(MalformedStateError):
        decode(bytes(damaged), encoded.storages)
