"""Takes Lightning's checkpoint apart, into tensors for torch's distributed checkpoint and the rest, and puts it together."""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ft.checkpoint.dcp_reading import content_directory, read_flat, unflatten
from lightning_ft.checkpoint.layout import META
from lightning_ft.checkpoint.store_path import place
from lightning_ft.errors import DamagedCheckpointError

STATE_DICT = "state_dict"
OPTIMIZER_STATES = "optimizer_states"
EXTRA = "extra"

_PLACE = "__lightning_ft_tensor__"
_OPTIMIZER = "optimizer_"
_LARGE = 64 << 10
_FSDP_STATE_DICT = "model"  # what Lightning's FSDPStrategy calls it


def split(checkpoint: Mapping[str, Any], names: Sequence[Sequence[str] | None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a checkpoint apart; nothing is copied, and it is not changed.

    Args:
        checkpoint: As ``dump_checkpoint`` returns it.
        names: The names of the parameters of each optimizer, in the order of its groups. None keeps the keys that its
            state has: they are names already, or its parameters have none.

    Returns:
        The nested tensors as ``ModelParallelStrategy`` saves them, and what belongs into ``meta.pt``.

    """
    rest = {key: value for key, value in checkpoint.items() if key not in (STATE_DICT, OPTIMIZER_STATES)}
    tensors: dict[str, Any] = {STATE_DICT: dict(checkpoint[STATE_DICT])}
    for index, state in enumerate(checkpoint.get(OPTIMIZER_STATES, ())):
        named = names[index] if index < len(names) else None
        tensors[optimizer_key(index)] = state if named is None else by_name(state, named)
    extra: dict[str, Tensor] = {}
    meta = {key: _take_tensors(value, extra) for key, value in rest.items()}
    if extra:
        tensors[EXTRA] = extra
    return tensors, meta


def join(tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint that :func:`split` took apart, with optimizers' states keyed as torch keys them."""
    extra = tensors.get(EXTRA, {})
    checkpoint = {key: _put_tensors(value, extra) for key, value in meta.items()}
    checkpoint[STATE_DICT] = state_dict_of(tensors)
    optimizers = sorted(int(key.removeprefix(_OPTIMIZER)) for key in tensors if key.startswith(_OPTIMIZER))
    if optimizers or "lr_schedulers" in meta:  # a checkpoint of weights only has neither
        checkpoint[OPTIMIZER_STATES] = [_by_number(tensors[optimizer_key(index)]) for index in optimizers]
    return checkpoint


def optimizer_key(index: int) -> str:
    """Return the top-level entry of an optimizer's state."""
    return f"{_OPTIMIZER}{index}"


def state_dict_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's state among the top-level entries of a checkpoint."""
    state: dict[str, Any] = tensors.get(STATE_DICT, tensors.get(_FSDP_STATE_DICT, {}))
    return state


def read_checkpoint(directory: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Return Lightning's checkpoint from a directory, whole and on the CPU, however many ranks it was saved by.

    Args:
        directory: The checkpoint; verify it first.
        weights_only: As in ``torch.load``, for everything that is not a tensor.

    Raises:
        DamagedCheckpointError: If there is nothing of Lightning's in it.
        UnpicklingError: If it has objects that ``weights_only`` does not allow.

    """
    directory = place(directory)
    meta = read_meta(directory, weights_only)
    return join(unflatten(read_flat(directory, weights_only=weights_only)), meta)


def read_meta(directory: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Return what a checkpoint's directory holds beside the large tensors."""
    where = place(directory)
    path = content_directory(where) / META
    if not where.exists():
        raise FileNotFoundError(f"Checkpoint {directory} does not exist.")
    if not path.exists():
        raise DamagedCheckpointError(str(directory), f"{META} is missing, so Lightning did not save it")
    try:
        with path.open("rb") as file:
            content = io.BytesIO(file.read())
        meta = torch.load(content, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"Checkpoint {directory} holds objects other than plain data and tensors, most often in the hyperparameters."
            f" Pass `weights_only=False` to the Trainer call if you trust it. Torch says: {error}"
        ) from error
    if not isinstance(meta, dict):
        raise DamagedCheckpointError(str(directory), f"{META} holds a {type(meta).__name__}, not a dict")
    return meta


def restore_tensors(meta: Mapping[str, Any], directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``meta`` with the tensors in it that :func:`split` took out of it.

    Args:
        meta: What is in ``meta.pt``, or what somebody who does not know of that left of it.
        directory: The checkpoint.

    """
    tensors = unflatten(read_flat(place(directory), weights_only=True, wanted=lambda path: path[0] == EXTRA))
    return {key: _put_tensors(value, tensors.get(EXTRA, {})) for key, value in meta.items()}


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state with names in place of the numbers of its parameters."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = state.get("param_groups", [])
    # Numbers, if the parameters had no names, became strings on their way through torch's distributed checkpoint.
    numbers = {str(name): number for number, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [numbers[str(name)] for name in group["params"]]} for group in groups]
    values = {numbers[name]: value for name, value in state.get("state", {}).items()}
    values = {number: values[number] for number in sorted(values)}
    return {**state, "state": values, "param_groups": numbered}


def _take_tensors(value: Any, extra: dict[str, Tensor]) -> Any:
    """Move DTensors and large tensors to ``extra``; what holds none stays the same object."""
    if isinstance(value, DTensor) or (isinstance(value, Tensor) and _is_large(value)):
        key = str(len(extra))
        extra[key] = value
        return {_PLACE: key}
    if type(value) in (dict, OrderedDict):
        items = {key: _take_tensors(part, extra) for key, part in value.items()}
        return value if all(items[key] is part for key, part in value.items()) else type(value)(items)
    if type(value) in (list, tuple):
        parts = [_take_tensors(part, extra) for part in value]
        return value if all(new is part for new, part in zip(parts, value, strict=True)) else type(value)(parts)
    return value


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() >= _LARGE


def _put_tensors(value: Any, extra: Mapping[str, Tensor]) -> Any:
    if type(value) is dict and value.keys() == {_PLACE}:
        return extra[value[_PLACE]]
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            value[key] = _put_tensors(part, extra)
    elif type(value) in (list, tuple):
        return type(value)(_put_tensors(part, extra) for part in value)
    return value
