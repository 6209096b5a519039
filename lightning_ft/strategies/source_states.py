"""Where the streams of all ranks are, as it is put down in memory with the rest of the training state."""

import logging
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def pack(states: dict[int, dict[str, Any]]) -> Tensor:
    """Return what :func:`unpack` takes: states are whatever the user's sources return.

    Args:
        states: By stream. A rank knows that of its own, and what it was told of others.

    """
    try:
        packed = pickle.dumps(states)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        log.debug("States of streams are not put down: %s", error)  # told when the first one was to be kept
        packed = pickle.dumps({})
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack(packed: Iterable[Tensor]) -> dict[int, dict[str, Any]]:
    """Return the states that any rank put down, by stream."""
    states: dict[int, dict[str, Any]] = {}
    for of_rank in packed:
        states |= pickle.loads(of_rank.numpy().tobytes())
    return states
