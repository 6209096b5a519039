"""Turns the training state that a joining rank receives into a typed header and raw storages, and back; no pickle.

The header is JSON. ``None``, booleans, strings and ordinary numbers stand for themselves; anything else is a list whose
first item is a tag from a closed table and whose other items are its parts. Memory of tensors is not in the header: it
is streamed next to it, each storage once, straight from and into the tensors' own memory.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ft.elastic.state_storages import SUPPORTED_DTYPES, StorageTable, place_storages, rebuild_tensor
from lightning_ft.elastic.state_types import CODECS, FACTORIES, MAPPING_FACTORIES, MAPPINGS, find_tag
from lightning_ft.errors import MalformedStateError, UnsupportedStateError

_FORMAT = "lightning_ft.state/1"
_MAX_DEPTH = 100  # far from the interpreter's own limit, which would end in a less helpful error
_MAX_PLAIN_INT = 2**63
_DEFAULT_ADVICE = "Return plain data and tensors from `state_dict()`, or leave this out and build it again on each rank."

_Where = tuple["_Where", Any] | tuple[()]  # the last key or index on the way to a value, after those before it


@dataclass(frozen=True)
class EncodedState:
    """A state in the form in which it is sent.

    Args:
        header: Describes the state; ASCII.
        storages: Memory to send after it, in this order: flat uint8 views, on the CPU without a copy.
        skipped: Where values were left out, written like the expression that reads them.

    """

    header: bytes
    storages: list[Tensor]
    skipped: list[str]


def encode(state: Any, *, on_unsupported: Literal["raise", "skip"] = "raise") -> EncodedState:
    """Describe a state and collect the memory to send.

    The same list or dict at two places arrives as two; tensors that share memory share it again.

    Args:
        state: Nested plain data with tensors. It must not change until the storages are sent, they are not copies.
        on_unsupported: ``"skip"`` leaves out the nearest dict entry around a value that cannot be sent.

    Raises:
        UnsupportedStateError: If a value is of another type, or contains itself.

    """
    encoder = _Encoder(skip=on_unsupported == "skip")
    root = encoder.encode(state, ())
    storages = encoder.table.finish()
    header = {"format": _FORMAT, "storages": [storage.numel() for storage in storages], "root": root}
    return EncodedState(json.dumps(header, separators=(",", ":")).encode("ascii"), storages, encoder.skipped)


def allocate(header: bytes) -> list[Tensor]:
    """Make room for the storages of a header, to receive into and then give to :func:`decode`.

    Raises:
        MalformedStateError: If the header is not what :func:`encode` makes.

    """
    return [torch.empty(size, dtype=torch.uint8) for size in _parse(header)["storages"]]


def decode(header: bytes, storages: Sequence[Tensor], *, map_location: torch.device | str | None = None) -> Any:
    """Rebuild a state.

    Args:
        header: As made by :func:`encode`.
        storages: Its storages, received. Tensors on their device use this memory, they are not copies.
        map_location: Device for all tensors; ``None`` for that of ``storages``.

    Raises:
        MalformedStateError: If the header is not what :func:`encode` makes, or does not belong to these storages.

    """
    parsed = _parse(header)
    sizes = [storage.numel() for storage in storages]
    if sizes != parsed["storages"] or any(storage.dtype != torch.uint8 for storage in storages):
        raise MalformedStateError(f"expected uint8 storages of {parsed['storages']} bytes, received {sizes}")
    device = torch.device("cpu" if map_location is None else map_location)
    try:
        return _Decoder(place_storages(storages, map_location), device).decode(parsed["root"])
    except MalformedStateError:
        raise
    except Exception as error:  # the parts came over the network: if a constructor refuses them, they are wrong
        raise MalformedStateError(f"{type(error).__name__}: {error}") from error


def _parse(header: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise MalformedStateError(f"the header of {len(header)} bytes is not JSON ({error})") from error
    if not isinstance(parsed, dict) or parsed.get("format") != _FORMAT or "root" not in parsed:
        raise MalformedStateError(f"the header is not of format {_FORMAT}")
    sizes = parsed.get("storages")
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < _MAX_PLAIN_INT for size in sizes):
        raise MalformedStateError("the header has no list of storage sizes")
    return parsed


class _Encoder:
    def __init__(self, skip: bool) -> None:
        self.table = StorageTable()
        self.skipped: list[str] = []
        self._skip = skip
        self._parents: list[int] = []

    def encode(self, value: Any, path: _Where) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is str and value.isascii():
            return value
        if kind is Tensor or kind is torch.nn.Parameter:
            return self._encode_tensor(value, path)
        if id(value) in self._parents or len(self._parents) == _MAX_DEPTH:
            what = "contains itself" if id(value) in self._parents else f"is nested deeper than {_MAX_DEPTH} levels"
            raise UnsupportedStateError(_format(path), f"a {kind.__name__} that {what}", "Send a flat copy of it.")
        self._parents.append(id(value))
        try:
            return self._encode_parts(value, path)
        finally:
            self._parents.pop()

    def _encode_tensor(self, tensor: Tensor, path: _Where) -> list[Any]:
        problem = _problem_of(tensor)
        if problem is not None:
            raise UnsupportedStateError(_format(path), problem, "Send a dense tensor with the same content instead.")
        return ["tensor", self.table.add(tensor)]  # as it is: the table completes it later

    def _encode_parts(self, value: Any, path: _Where) -> list[Any]:
        kind = type(value)
        if kind in MAPPINGS:
            return [MAPPINGS[kind], *self._encode_head(value, path), *self._encode_items(value, path)]
        tag = find_tag(value)
        if tag is None:
            raise UnsupportedStateError(_format(path), f"it is a {kind.__module__}.{kind.__qualname__}", _DEFAULT_ADVICE)
        parts = CODECS[tag][0](value)
        indexed = kind in (list, tuple, deque)
        return [tag, *(self.encode(part, (path, i) if indexed else path) for i, part in enumerate(parts))]

    def _encode_head(self, value: Any, path: _Where) -> list[Any]:
        if type(value) is not defaultdict:
            return []
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise UnsupportedStateError(
                _format(path),
                f"a defaultdict with factory {factory!r}",
                f"Use one of {', '.join(FACTORIES)} as factory, or send a plain dict.",
            )
        return [name]

    def _encode_items(self, mapping: dict[Any, Any], path: _Where) -> Iterator[Any]:
        for key, value in mapping.items():
            here = (path, key)
            mark = self.table.mark()
            try:
                item = self.encode(key, here), self.encode(value, here)
            except UnsupportedStateError:
                if not self._skip:
                    raise
                self.table.forget_since(mark)
                self.skipped.append(_format(here))
            else:
                yield from item


class _Decoder:
    def __init__(self, storages: Sequence[Tensor], device: torch.device) -> None:
        self._storages = storages
        self._device = device

    def decode(self, node: Any) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise MalformedStateError("it contains a bare JSON object")
            return node
        tag = node[0] if node else None
        if tag == "tensor":
            return rebuild_tensor(self._storages, self._device, *node[1])
        parts = [self.decode(part) for part in node[1:]]
        if tag in MAPPING_FACTORIES:
            return MAPPING_FACTORIES[tag](parts)
        if not isinstance(tag, str) or tag not in CODECS:
            raise MalformedStateError(f"it has a part of unknown type {tag!r}")
        return CODECS[tag][1](*parts)


def _format(path: _Where) -> str:
    """The expression that reads a value; the state's own keys stand first, bare."""
    keys: list[Any] = []
    while path:
        path, key = path
        keys.append(key)
    keys.reverse()
    first = keys.pop(0) if keys and type(keys[0]) is str else "state"
    return first + "".join(f"[{key!r}]" for key in keys)


def _problem_of(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.dtype not in SUPPORTED_DTYPES.values():
        return f"a tensor of type {tensor.dtype}"
    return "a tensor on the meta device, which has no content" if tensor.is_meta else None
