"""What a loader's samplers carry from epoch to epoch: their own generators, and what classes of the user count."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

_PLAIN = (bool, int, float, str, type(None))


def sampler_state(loader: Any) -> list[dict[str, Any]]:
    """Return the state of everything that decides the order of ``loader``, as plain data."""
    return sampler_reader(loader)()


def sampler_reader(loader: Any) -> Callable[[], list[dict[str, Any]]]:
    """Return what returns that state, also while something else stands in for the samplers."""
    parts = _parts(loader)
    return lambda: [_state_of(part, is_loader=part is loader) for part in parts]


def sampler_loader(loader: Any, states: list[dict[str, Any]]) -> Callable[[], None]:
    """Return what puts the samplers of ``loader`` where they were.

    Also what the user's own code put in there meanwhile: what it skips must not be skipped twice.

    Args:
        loader: The loader.
        states: What :func:`sampler_state` returned.

    """
    parts = _parts(loader)
    if [type(part).__qualname__ for part in parts] != [state["type"] for state in states]:
        return lambda: None  # other samplers: then it is another order anyway

    def load() -> None:
        for part, state in zip(parts, states, strict=True):
            for name, value in state["generators"].items():
                _set_generator(getattr(part, name), value)
            vars(part).update(state["plain"])
            if "own" in state:
                part.load_state_dict(state["own"])

    return load


def _parts(loader: Any) -> list[Any]:
    """The loader itself and its samplers, each once, from the outside inwards."""
    found: list[Any] = []
    queue = [loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while queue:
        part = queue.pop(0)
        if part is not None and hasattr(part, "__dict__") and all(part is not known for known in found):
            found.append(part)
            if part is not loader:
                queue += [getattr(part, "sampler", None), getattr(part, "batch_sampler", None)]
            if isinstance(part, DistributedSampler):  # around a sampler of the user's, of which Lightning made a dataset
                queue.append(getattr(part.dataset, "_sampler", None))
    return found


def _state_of(part: Any, *, is_loader: bool) -> dict[str, Any]:
    states = {name: _generator_state(value) for name, value in vars(part).items()}
    generators = {name: state for name, state in states.items() if state is not None}
    state: dict[str, Any] = {"type": type(part).__qualname__, "generators": generators, "plain": {}}
    if isinstance(part, DistributedSampler):
        state["plain"]["seed"] = part.seed  # Lightning takes it from the seed of the run, which may be another one
    is_stateful = callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
    is_of_user = not type(part).__module__.startswith(("torch.", "lightning.", "torchdata."))
    if not is_of_user or isinstance(part, DataLoader) or (is_loader and is_stateful):
        return state
    if is_stateful:
        state["own"] = part.state_dict()
        return state
    return {**state, "plain": {name: value for name, value in vars(part).items() if type(value) in _PLAIN}}


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return [version, list(words), gauss]
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state(legacy=True)
        return [str(kind), np.asarray(keys).tolist(), *rest]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state((state[0], np.array(state[1], dtype=np.uint32), *state[2:]))
