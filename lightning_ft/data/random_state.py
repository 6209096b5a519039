"""The global random number generators of this process, as plain data."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of the CPU generators that samplers, datasets and worker seeds draw from."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],
        "python": [version, list(words), gauss],
    }


@contextmanager
def under_random_state(state: dict[str, Any] | None) -> Iterator[None]:
    """Draw from ``state`` for a while, and leave the generators as they were; with None, do nothing."""
    if state is None:
        yield
        return
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def set_random_state(state: dict[str, Any]) -> None:
    """Draw from ``state``, which :func:`random_state` returned, from now on."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
