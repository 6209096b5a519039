"""The closed table of types that a state may be made of, each as a tag and parts of simpler types."""

import base64
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch

from lightning_ft.errors import MalformedStateError

FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_PATHS = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath, WindowsPath)}


def _pairs(parts: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
MAPPING_FACTORIES: dict[Any, Callable[[list[Any]], Any]] = {
    "dict": lambda parts: dict(_pairs(parts)),
    "OrderedDict": lambda parts: OrderedDict(_pairs(parts)),
    "Counter": lambda parts: Counter(dict(_pairs(parts))),
    "defaultdict": lambda parts: defaultdict(None if parts[0] is None else FACTORIES[parts[0]], _pairs(parts[1:])),
}


def _unpack_float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _find_enum(module: str, qualname: str) -> type[Enum] | None:
    """An Enum class that is there already; nothing is imported, no ``__getattr__`` of a module is called."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, Enum) else None


def _unpack_enum(module: str, qualname: str, name: str) -> Enum:
    kind = _find_enum(module, qualname)
    if kind is None:
        raise MalformedStateError(f"{module}.{qualname} is not an Enum that was imported here")
    return kind.__members__[name]


def _numpy_dtype(name: str) -> "np.dtype[Any]":
    dtype = np.dtype(name)
    if dtype.kind not in "biufcmMSU" or dtype.str != name or dtype.hasobject or not dtype.itemsize:
        raise MalformedStateError(f"{name!r} is not a plain NumPy type")
    return dtype


def _pack_array(array: "np.ndarray[Any, Any]") -> tuple[Any, ...]:
    flat = np.ascontiguousarray(array).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()  # torch warns about memory that it may not write
    return array.dtype.str, *array.shape, torch.from_numpy(flat.view(np.uint8))


def _unpack_array(name: str, *rest: Any) -> "np.ndarray[Any, Any]":
    *shape, memory = rest
    dtype = _numpy_dtype(name)
    array: np.ndarray[Any, Any] = memory.cpu().numpy().view(dtype).reshape([int(size) for size in shape])
    return array


def find_tag(value: Any) -> str | None:
    """The tag of a value's type in :data:`CODECS`; ``None`` if it is not supported. Subclasses are not."""
    kind = type(value)
    if isinstance(value, Enum):
        same_class = _find_enum(kind.__module__, kind.__qualname__) is kind
        return "Enum" if same_class and kind.__members__.get(str(value.name)) is value else None
    if isinstance(value, np.ndarray | np.generic):
        plain = value.dtype.kind in ("biufcmMSU" if kind is np.ndarray else "biufcmM") and value.dtype.itemsize > 0
        return ("array" if kind is np.ndarray else "scalar") if plain and kind.__module__ == "numpy" else None
    if isinstance(value, PurePath):
        return "Path" if kind in _PATHS.values() else None
    return _TAGS.get(kind)


_Codec = tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]

# tag: (parts of a value, value from its parts). The parts are encoded in turn, so they may be of any supported type.
CODECS: dict[str, _Codec] = {
    "int": (lambda value: [hex(value)], lambda text: int(text, 16)),
    "float": (lambda value: [struct.pack(">d", value).hex()], _unpack_float),
    "str": (
        lambda value: [base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()],
        lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    ),
    "bytes": (lambda value: [base64.b64encode(value).decode()], lambda text: base64.b64decode(text, validate=True)),
    "complex": (lambda value: [value.real, value.imag], complex),
    "list": (lambda value: value, lambda *parts: list(parts)),
    "tuple": (lambda value: value, lambda *parts: parts),
    "set": (lambda value: value, lambda *parts: set(parts)),
    "frozenset": (lambda value: value, lambda *parts: frozenset(parts)),
    "deque": (lambda value: [*value, value.maxlen], lambda *parts: deque(parts[:-1], parts[-1])),
    "slice": (lambda value: [value.start, value.stop, value.step], slice),
    "range": (lambda value: [value.start, value.stop, value.step], range),
    "date": (lambda value: [value.year, value.month, value.day], date),
    "time": (
        lambda value: [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold],
        lambda *parts: time(*parts[:-1], fold=parts[-1]),
    ),
    "datetime": (
        lambda value: [value.date(), value.timetz()],
        lambda day, moment: datetime.combine(day, moment),
    ),
    "timedelta": (lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    "timezone": (lambda value: [value.utcoffset(None)], timezone),
    "Path": (lambda value: [type(value).__name__, str(value)], lambda kind, text: _PATHS[kind](text)),
    "Enum": (lambda value: [type(value).__module__, type(value).__qualname__, value.name], _unpack_enum),
    "Size": (lambda value: value, lambda *parts: torch.Size(parts)),
    "dtype": (lambda value: [str(value).removeprefix("torch.")], lambda name: _DTYPES[name]),
    "device": (lambda value: [str(value)], torch.device),
    "array": (_pack_array, _unpack_array),
    "scalar": (
        lambda value: [value.dtype.str, value.tobytes()],
        lambda name, content: np.frombuffer(content, _numpy_dtype(name), count=1)[0],
    ),
}
_TAGS: dict[type, str] = {
    kind: kind.__name__
    for kind in (
        int,
        float,
        str,
        bytes,
        complex,
        list,
        tuple,
        set,
        frozenset,
        deque,
        slice,
        range,
        date,
        time,
        datetime,
    )
} | {kind: kind.__name__ for kind in (timedelta, timezone, torch.Size, torch.dtype, torch.device)}
