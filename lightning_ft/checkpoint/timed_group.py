"""The ranks of the default process group, each wait for whom has a limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store

from lightning_ft.checkpoint._torch_compat import default_store
from lightning_ft.checkpoint.reader import DefaultGroup
from lightning_ft.errors import CollectiveTimeoutError

_T = TypeVar("_T")


class TimedGroup(DefaultGroup):
    """They exchange plain data through the store that they met by.

    Args:
        operation: What they do, for errors.
        timeout: How long each wait may take.

    """

    _number_of_group = 0
    _number = 0
    _group: dist.ProcessGroup | None = None

    def __init__(self, operation: str, timeout: timedelta) -> None:
        self._operation = operation
        self._timeout = timeout
        self._store = default_store() if self.size > 1 else None

    def _gather(self, value: _T) -> list[_T]:
        """Collective.

        Raises:
            CollectiveTimeoutError: Naming the ranks that did not come.

        """
        if self._store is None:
            return [value]
        before, key = f"{self._next()}/", f"{self._next(1)}/"
        self._store.set(f"{key}{self.rank}", json.dumps(value))
        keys = {f"{key}{rank}": rank for rank in range(self.size)}
        wait_for(self._store, keys, self._operation, self._timeout)
        self._store.delete_key(f"{before}{self.rank}")  # who came here has read it
        return [json.loads(self._store.get(one)) for one in keys]

    def _next(self, more: int = 0) -> str:
        """Return a name that every rank gives to the same exchange."""
        if TimedGroup._group is not dist.group.WORLD:
            TimedGroup._group, TimedGroup._number = dist.group.WORLD, 0
            TimedGroup._number_of_group += 1
        TimedGroup._number += more
        return f"lightning_ft/exchange/{TimedGroup._number_of_group}/{TimedGroup._number}"


def wait_for(store: Store, keys: Mapping[str, int], operation: str, timeout: timedelta) -> None:
    """Return once ranks have set what they are to set.

    Args:
        store: A connection that nobody else uses meanwhile.
        keys: The rank of each key.
        operation: What this is for.
        timeout: How long it may take.

    Raises:
        CollectiveTimeoutError: If it takes longer.

    """
    try:
        store.wait(list(keys), timeout)
    except RuntimeError as error:
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        if not missing:
            return
        raise CollectiveTimeoutError(operation, timeout.total_seconds(), missing) from error
