"""Tensors as views of flat storages: each memory is sent once, and what shared it shares it again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ft.errors import MalformedStateError

# Types whose elements are whole bytes; quantized ones carry a scale that a storage does not hold.
SUPPORTED_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
_ALIGNMENT = 16  # the largest element, complex128


class StorageTable:
    """Collects tensors, then says which spans of which storages hold them."""

    def __init__(self) -> None:
        self._entries: list[tuple[list[Any], Tensor]] = []

    def add(self, tensor: Tensor) -> list[Any]:
        """Remember a dense tensor.

        Returns:
            The arguments of :func:`rebuild_tensor` after the first two. The list is completed by :meth:`finish`.

        """
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        requires_grad = tensor.requires_grad
        tensor = tensor.detach().resolve_conj().resolve_neg()  # those two are lazy: their memory is not their content
        name = str(tensor.dtype).removeprefix("torch.")
        parts = [None, 0, name, list(tensor.shape), list(tensor.stride()), requires_grad, is_parameter]
        self._entries.append((parts, tensor))
        return parts

    def mark(self) -> int:
        """A moment to go back to."""
        return len(self._entries)

    def forget_since(self, mark: int) -> None:
        """Forget the tensors added since then."""
        del self._entries[mark:]

    def finish(self) -> list[Tensor]:
        """Complete what :meth:`add` returned and return the memory to send, as flat uint8 tensors on the CPU."""
        spans: dict[_Key, tuple[int, int]] = {}
        owners: dict[_Key, Tensor] = {}
        views = [(parts, tensor, _storage_key(tensor)) for parts, tensor in self._entries if tensor.numel()]
        for _, tensor, key in views:
            begin, end = _byte_span(tensor)
            first, last = spans.get(key, (begin, end))
            spans[key] = min(begin, first), max(end, last)
            owners[key] = tensor
        index = {key: number for number, key in enumerate(spans)}
        for parts, tensor, key in views:
            parts[:2] = index[key], tensor.storage_offset() - spans[key][0] // tensor.itemsize
        return [_as_bytes(owners[key], *span) for key, span in spans.items()]


_Key = tuple[torch.device, int, int]


def _storage_key(tensor: Tensor) -> _Key:
    storage = tensor.untyped_storage()
    return tensor.device, int(storage.data_ptr()), int(storage.nbytes())


def _byte_span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of the storage that a view needs; an aligned begin keeps views of other types valid."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    num_bytes = _num_spanned(tensor.shape, tensor.stride()) * tensor.itemsize
    return begin - begin % _ALIGNMENT, begin + num_bytes


def _num_spanned(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last one of a view that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _as_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (end - begin,), (1,)).cpu()


def place_storages(storages: Sequence[Tensor], device: torch.device | str | None) -> list[Tensor]:
    """Bring received storages to a device and to an address at which views of any type are valid."""
    placed = [storage if device is None else storage.to(device) for storage in storages]
    return [storage if _is_usable(storage) else storage.clone(memory_format=torch.contiguous_format) for storage in placed]


def _is_usable(storage: Tensor) -> bool:
    aligned = storage.data_ptr() % _ALIGNMENT == 0 and storage.storage_offset() % _ALIGNMENT == 0
    return aligned and storage.is_contiguous()


def rebuild_tensor(
    storages: Sequence[Tensor],
    device: torch.device,
    index: int | None,
    offset: int,
    dtype_name: str,
    size: list[int],
    stride: list[int],
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Make a tensor from the description that :meth:`StorageTable.add` returned.

    Args:
        storages: Flat uint8 tensors, as from :func:`place_storages`.
        device: Device for tensors without elements.
        index: Which storage the tensor is a view of; ``None`` if it has no elements.
        offset: Its first element, counted in elements from the storage's begin.
        dtype_name: Its type.
        size: Its shape.
        stride: Its strides, in elements.
        requires_grad: Whether it requires a gradient.
        is_parameter: Whether it is a parameter.

    Raises:
        MalformedStateError: If the view does not lie inside of its storage.

    """
    dtype = SUPPORTED_DTYPES.get(dtype_name)
    if dtype is None:
        raise MalformedStateError(f"a tensor has unknown type {dtype_name!r}")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)) or len(size) != len(stride):
        raise MalformedStateError(f"a tensor has offset {offset}, size {size} and stride {stride}")
    empty = 0 in size
    if empty != (index is None):
        raise MalformedStateError(f"a tensor of size {size} is a view of storage {index}")
    if index is None:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    else:
        if type(index) is not int or not 0 <= index < len(storages):
            raise MalformedStateError(f"a tensor is a view of storage {index} of {len(storages)}")
        tensor = _view(storages[index], offset, dtype, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _view(storage: Tensor, offset: int, dtype: torch.dtype, size: list[int], stride: list[int]) -> Tensor:
    end = (offset + _num_spanned(size, stride)) * dtype.itemsize
    if end > storage.numel():  # torch would not refuse, but enlarge the storage
        raise MalformedStateError(f"a tensor ends at byte {end} of a storage of {storage.numel()} bytes")
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage.untyped_storage(), storage.storage_offset() // dtype.itemsize + offset, size, stride)
